"""The applications of the paper, each an optional extra: ``bellmax[ner]``, and so on."""
