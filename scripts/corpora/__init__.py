"""Parallel text out of Debian's packages: catalogues and documents that exist in both languages."""
