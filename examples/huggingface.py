"""Train BERT with a CRF using the Trainer of transformers, save it, load it, and tag new sentences.

The script downloads nothing. It generates the sentences, the vocabulary of a tokenizer that splits names into
sub-words, and a base checkpoint: a tiny BERT with random weights. For a real checkpoint, copy BertCRF, encode, metrics
and tag. The tutorial docs/tutorials/huggingface.md explains the steps.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
import transformers as hf
from seqeval.metrics import f1_score
from torch import Tensor
from transformers.modeling_outputs import TokenClassifierOutput

from bellmax.nn import CRF, tag_constraints

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
WORDS = ["today", "yesterday", "and", "met", "saw", "slept", "in", "near", ",", "."]
SYLLABLES = ["ba", "de", "fi", "go", "lu", "ma", "ne", "pi", "ro", "su", "ta", "vo"]


class BertCRF(hf.BertPreTrainedModel):
    """BERT with a linear layer that scores the tags of each token, and a CRF."""

    def __init__(self, config: hf.BertConfig) -> None:
        super().__init__(config)
        self.bert = hf.BertModel(config, add_pooling_layer=False)
        self.classifier = torch.nn.Linear(config.hidden_size, config.num_labels)
        labels = [config.id2label[n] for n in range(config.num_labels)]
        self.crf = CRF(config.num_labels, constraints=tag_constraints(labels, scheme="IOB2"))
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, CRF):  # otherwise from_pretrained leaves the CRF uninitialized
            module.reset_parameters()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,  # the tokenizers of BERT return it
        labels: Tensor | None = None,
    ) -> TokenClassifierOutput:
        logits = self.classifier(self.bert(input_ids, attention_mask, token_type_ids).last_hidden_state)
        loss = None if labels is None else self.crf(logits, labels)  # the CRF skips steps with the label -100
        return TokenClassifierOutput(loss=loss, logits=logits)


def first_subwords(word_ids: list[int | None]) -> list[bool]:
    """Return a mask, True at the first sub-word of each word, False at other sub-words, special tokens and padding."""
    return [word is not None and word != before for before, word in pairwise([None, *word_ids])]


def encode(tokenizer: hf.BertTokenizer, words: list[str], tags: list[str]) -> dict[str, list[int]]:
    """Return the input of the model for a sentence, with labels: −100 except at the first sub-word of each word."""
    encoding = tokenizer(words, is_split_into_words=True, truncation=True)
    ids = encoding.word_ids()
    labels = [LABELS.index(tags[n]) if first else -100 for n, first in zip(ids, first_subwords(ids), strict=True)]
    return {**encoding, "labels": labels}


@torch.no_grad()
def tag(model: BertCRF, tokenizer: hf.BertTokenizer, sentences: list[list[str]]) -> list[list[str | None]]:
    """Return the tag of each word, or None for words beyond the maximum length of the model."""
    batch = tokenizer(sentences, is_split_into_words=True, padding=True, truncation=True, return_tensors="pt")
    mask = torch.tensor([first_subwords(batch.word_ids(n)) for n in range(len(sentences))])
    best = model.eval().crf.decode(model(**batch.to(model.device)).logits, mask=mask.to(model.device)).cpu()
    found = [[model.config.id2label[n] for n in row[kept].tolist()] for row, kept in zip(best, mask, strict=True)]
    return [[*tags, *[None] * (len(words) - len(tags))] for words, tags in zip(sentences, found, strict=True)]


def metrics(prediction: hf.EvalPrediction) -> dict[str, float]:
    """Return the F1 score of the entities. The predictions are tags that the CRF has decoded."""
    rows = zip(prediction.predictions, prediction.label_ids, prediction.label_ids != -100, strict=True)
    found, gold = zip(
        *(([LABELS[n] for n in row[kept]], [LABELS[n] for n in true[kept]]) for row, true, kept in rows), strict=True
    )
    return {"f1": f1_score(list(gold), list(found))}


def make_tokenizer() -> hf.BertTokenizer:
    """Return a tokenizer that knows the words and splits all names into syllables."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *WORDS, *SYLLABLES, *(f"##{syllable}" for syllable in SYLLABLES)]
    return hf.BertTokenizer(vocab={piece: n for n, piece in enumerate(pieces)}, model_max_length=64)


def make_sentence(rng: random.Random) -> tuple[list[str], list[str]]:
    """Return words and tags. People and places have similar names, so only the context shows the type of a name."""
    who, did, where = ("PER", "PER and PER"), ("slept", "met PER", "saw PER"), ("in LOC .", "near LOC .")
    words, tags = [], []
    for word in " ".join(map(rng.choice, (("", "today ,", "yesterday ,"), who, did, where))).split():
        is_name = word in ("PER", "LOC")
        name = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3))]
        words += name if is_name else [word]
        tags += [f"B-{word}"] + [f"I-{word}"] * (len(name) - 1) if is_name else ["O"]
    return words, tags


def train(model: BertCRF, tokenizer: hf.BertTokenizer, rows: list, folder: Path, epochs: int, seed: int) -> hf.Trainer:
    """Train the model on encoded sentences. Return the Trainer, which can evaluate other sentences."""
    new = [*model.classifier.parameters(), *model.crf.parameters()]
    # For a pretrained encoder, use a learning rate of 2e-5 to 5e-5.
    groups = [{"params": model.bert.parameters(), "lr": 3e-3}, {"params": new, "lr": 3e-2}]
    options = {"per_device_train_batch_size": 16, "num_train_epochs": epochs, "seed": seed, "use_cpu": True}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    trainer = hf.Trainer(
        model,
        hf.TrainingArguments(str(folder), **options, **quiet),
        data_collator=hf.DataCollatorForTokenClassification(tokenizer),  # pads labels with -100
        train_dataset=rows,
        optimizers=(torch.optim.AdamW(groups), None),
        compute_metrics=metrics,
        # By default, the Trainer passes logits to compute_metrics, and their argmax ignores the CRF.
        preprocess_logits_for_metrics=lambda logits, labels: model.crf.decode(logits, mask=labels != -100),
    )
    trainer.remove_callback(hf.PrinterCallback)
    trainer.train()
    return trainer


def run(folder: Path, epochs: int, seed: int) -> float:
    """Train, save, load and tag. Return the fraction of words in held-out sentences with the right tag."""
    hf.set_seed(seed)
    rng, tokenizer = random.Random(seed), make_tokenizer()
    corpus = [make_sentence(rng) for _ in range(500)]
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = hf.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=tokenizer.model_max_length, **size)
    hf.BertModel(config).save_pretrained(folder / "base")

    names = {"id2label": dict(enumerate(LABELS)), "label2id": {label: n for n, label in enumerate(LABELS)}}
    model = BertCRF.from_pretrained(folder / "base", **names)
    trainer = train(model, tokenizer, [encode(tokenizer, *pair) for pair in corpus[:400]], folder, epochs, seed)
    held_out = [encode(tokenizer, *pair) for pair in corpus[400:]]
    print(f"F1 of entities on held-out sentences: {trainer.evaluate(held_out)['eval_f1']:.3f}")
    model.save_pretrained(folder / "tagger")
    tokenizer.save_pretrained(folder / "tagger")

    model = BertCRF.from_pretrained(folder / "tagger")
    tokenizer = hf.BertTokenizer.from_pretrained(folder / "tagger")
    sentences, gold = zip(*corpus[400:], strict=True)
    found = tag(model, tokenizer, list(sentences))
    for words, tags in zip(sentences[:3], found[:3], strict=True):
        print(*(f"{word}/{label}" for word, label in zip(words, tags, strict=True)))
    right = [a == b for pair in zip(found, gold, strict=True) for a, b in zip(*pair, strict=True)]
    print(f"{sum(right)} of {len(right)} words in {len(gold)} held-out sentences have the right tag")
    return sum(right) / len(right)


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for both models (default: a temporary folder)")
    parser.add_argument("--epochs", type=int, default=8, help="number of epochs (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of sentences, weights and batches (default: 0)")
    options = parser.parse_args(argv)
    hf.logging.set_verbosity_error()  # hides the list of weights that the base checkpoint lacks
    hf.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        return run(options.output or Path(temporary), options.epochs, options.seed)


if __name__ == "__main__":
    main()
