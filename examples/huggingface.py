"""Train Bert with a CRF head using the Trainer of transformers, save it, load it, and tag new sentences.

Nothing is downloaded: the sentences, the vocabulary of a BertTokenizer that splits names into sub-words, and a tiny
Bert with random weights, which is saved as the base checkpoint, are made here. For another checkpoint copy BertCRF,
encode, metrics and tag.
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
    def __init__(self, config: hf.BertConfig) -> None:
        super().__init__(config)
        self.bert = hf.BertModel(config, add_pooling_layer=False)
        self.classifier = torch.nn.Linear(config.hidden_size, config.num_labels)
        labels = [config.id2label[n] for n in range(config.num_labels)]
        self.crf = CRF(config.num_labels, constraints=tag_constraints(labels, scheme="IOB2"))
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, CRF):  # from_pretrained leaves weights that the checkpoint lacks uninitialised
            module.reset_parameters()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,  # which the tokenizers of Bert return
        labels: Tensor | None = None,
    ) -> TokenClassifierOutput:
        logits = self.classifier(self.bert(input_ids, attention_mask, token_type_ids).last_hidden_state)
        loss = None if labels is None else self.crf(logits, labels)  # steps with the label -100 are masked
        return TokenClassifierOutput(loss=loss, logits=logits)


def first_subwords(word_ids: list[int | None]) -> list[bool]:
    """True at the first sub-word of each word, False at the others, at special tokens and at padding."""
    return [word is not None and word != before for before, word in pairwise([None, *word_ids])]


def encode(tokenizer: hf.BertTokenizer, words: list[str], tags: list[str]) -> dict[str, list[int]]:
    encoding = tokenizer(words, is_split_into_words=True, truncation=True)
    ids = encoding.word_ids()
    labels = [LABELS.index(tags[n]) if first else -100 for n, first in zip(ids, first_subwords(ids), strict=True)]
    return {**encoding, "labels": labels}


@torch.no_grad()
def tag(model: BertCRF, tokenizer: hf.BertTokenizer, sentences: list[list[str]]) -> list[list[str | None]]:
    """The tag of each word; None for words beyond the maximum length of the model."""
    batch = tokenizer(sentences, is_split_into_words=True, padding=True, truncation=True, return_tensors="pt")
    mask = torch.tensor([first_subwords(batch.word_ids(n)) for n in range(len(sentences))])
    best = model.eval().crf.decode(model(**batch.to(model.device)).logits, mask=mask.to(model.device)).cpu()
    found = [[model.config.id2label[n] for n in row[kept].tolist()] for row, kept in zip(best, mask, strict=True)]
    return [[*tags, *[None] * (len(words) - len(tags))] for words, tags in zip(sentences, found, strict=True)]


def metrics(prediction: hf.EvalPrediction) -> dict[str, float]:
    """F1 of entities, from the tags that the CRF decodes and the tags of the data."""
    rows = zip(prediction.predictions, prediction.label_ids, prediction.label_ids != -100, strict=True)
    found, gold = zip(
        *(([LABELS[n] for n in row[kept]], [LABELS[n] for n in true[kept]]) for row, true, kept in rows), strict=True
    )
    return {"f1": f1_score(list(gold), list(found))}


def make_tokenizer() -> hf.BertTokenizer:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *WORDS, *SYLLABLES, *(f"##{syllable}" for syllable in SYLLABLES)]
    return hf.BertTokenizer(vocab={piece: n for n, piece in enumerate(pieces)}, model_max_length=64)


def make_sentence(rng: random.Random) -> tuple[list[str], list[str]]:
    """Words and tags. Names of people and places have the same syllables: only the context tells them apart."""
    who, did, where = ("PER", "PER and PER"), ("slept", "met PER", "saw PER"), ("in LOC .", "near LOC .")
    words, tags = [], []
    for word in " ".join(map(rng.choice, (("", "today ,", "yesterday ,"), who, did, where))).split():
        is_name = word in ("PER", "LOC")
        name = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 3))]
        words += name if is_name else [word]
        tags += [f"B-{word}"] + [f"I-{word}"] * (len(name) - 1) if is_name else ["O"]
    return words, tags


def train(model: BertCRF, tokenizer: hf.BertTokenizer, rows: list, folder: Path, epochs: int, seed: int) -> hf.Trainer:
    new = [*model.classifier.parameters(), *model.crf.parameters()]
    groups = [{"params": model.bert.parameters(), "lr": 3e-3}, {"params": new, "lr": 3e-2}]  # far less if pretrained
    options = {"per_device_train_batch_size": 16, "num_train_epochs": epochs, "seed": seed, "use_cpu": True}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    trainer = hf.Trainer(
        model,
        hf.TrainingArguments(str(folder), **options, **quiet),
        data_collator=hf.DataCollatorForTokenClassification(tokenizer),  # pads the labels with -100
        train_dataset=rows,
        optimizers=(torch.optim.AdamW(groups), None),
        compute_metrics=metrics,
        # Without this, evaluate and predict return logits, and their argmax would skip the CRF.
        preprocess_logits_for_metrics=lambda logits, labels: model.crf.decode(logits, mask=labels != -100),
    )
    trainer.remove_callback(hf.PrinterCallback)
    trainer.train()
    return trainer


def run(folder: Path, epochs: int, seed: int) -> float:
    """The share of words in held-out sentences that get the right tag."""
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
    parser.add_argument("--output", type=Path, help="folder for both models (default: a temporary one)")
    parser.add_argument("--epochs", type=int, default=8, help="default: 8")
    parser.add_argument("--seed", type=int, default=0, help="of sentences, weights and batches (default: 0)")
    options = parser.parse_args(argv)
    hf.logging.set_verbosity_error()  # hides the list of weights that a base checkpoint does not hold
    hf.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        return run(options.output or Path(temporary), options.epochs, options.seed)


if __name__ == "__main__":
    main()
