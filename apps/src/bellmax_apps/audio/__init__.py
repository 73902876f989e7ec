"""Audio-to-score alignment (section 5.3 of the paper). Needs the extra ``bellmax[audio]``."""
