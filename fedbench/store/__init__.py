"""The results database: schema, connection, what runs write, what reports read."""
