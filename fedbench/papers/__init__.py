"""One YAML per paper (settings and layouts); `published/` holds the numbers as the papers print them."""
