"""Named entity recognition (section 5.2 of the paper). Needs the extra ``bellmax[ner]``."""
