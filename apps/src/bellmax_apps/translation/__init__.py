"""Translation with structured attention (section 6 of the paper). Needs the extra ``bellmax[translation]``."""
