"""Training of translation models; depends on `translator`, never the other way round."""
