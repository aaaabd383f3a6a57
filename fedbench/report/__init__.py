"""Tables and plots from the results database. Reads only, and imports no torch."""
