"""Three applications of bellmax, as subcommands of ``bellmax``: ``ner``, ``audio`` and ``translation``."""
