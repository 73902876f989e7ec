"""Entry points for the command ``bellmax``."""

from bellmax_command import Subcommand

NER = Subcommand(
    "Named entity recognition: train on columns of tokens and tags, and tag.",
    "bellmax_apps.ner.commands:app",
    ("rich", "seqeval"),
    "bellmax-apps",
)
AUDIO = Subcommand(
    "Audio-to-score alignment: find when a recording plays each note of a score.",
    "bellmax_apps.audio.commands:app",
    ("rich", "librosa", "soundfile", "pretty_midi", "scipy"),
    "bellmax-apps",
)
TRANSLATION = Subcommand(
    "Translation: train on parallel text, translate, and plot the attention.",
    "bellmax_apps.translation.commands:app",
    ("rich", "sacremoses", "sacrebleu", "tokenizers"),
    "bellmax-apps",
)
