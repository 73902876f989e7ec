"""A CRF as the head of a transformers model, which is built on the meta device before weights are loaded."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest
import torch
from torch import nn

import bellmax as bx
from bellmax.nn import CRF, tag_constraints

hf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
seqeval = pytest.importorskip("seqeval.metrics")
safetensors = pytest.importorskip("safetensors.torch")

EXAMPLE = Path(__file__).parents[1] / "examples" / "huggingface.py"
spec = importlib.util.spec_from_file_location("huggingface_example", EXAMPLE)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)

LABELS = example.LABELS
NAMES = {"id2label": dict(enumerate(LABELS)), "label2id": {label: n for n, label in enumerate(LABELS)}}
SIZE = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
SCORES = "transition_scores", "start_scores", "end_scores"


class WithGamma(example.BertCRF):
    """A model with learnable γ. Its tensor has device="cpu", because a meta tensor has no initial value."""

    def __init__(self, config):
        super().__init__(config)
        gamma = nn.Parameter(torch.tensor(2.0, device="cpu"))
        self.crf = CRF(len(LABELS), omega=bx.SquaredL2(gamma), constraints=tag_constraints(LABELS))
        self.post_init()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Path of a checkpoint without a CRF."""
    folder = tmp_path_factory.mktemp("base")
    hf.BertModel(hf.BertConfig(**SIZE)).save_pretrained(folder)
    return folder


def dirty_memory():
    """Fill freed memory with large numbers and NaN."""
    shapes = (len(LABELS), len(LABELS)), (len(LABELS),), ()
    for value in (1e38, float("nan")):
        held = [torch.full(shape, value) for shape in shapes for _ in range(500)]
        del held


def randomize(crf):
    for name in SCORES:
        nn.init.normal_(getattr(crf, name))


def assert_fresh(crf):
    assert all(bool((getattr(crf, name) == 0).all()) for name in SCORES)
    assert_constrained(crf)


def assert_constrained(crf):
    for name, expected in tag_constraints(LABELS)._asdict().items():
        assert torch.equal(getattr(crf, f"allowed_{name}"), expected)


def some_batch():
    """Input ids, an attention mask (int64), and labels with special tokens, a continued word and padding."""
    ids = torch.randint(4, 40, (3, 6))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]])
    labels = torch.tensor(
        [[-100, 1, -100, 2, 0, -100], [-100, 3, 4, -100, -100, -100], [-100, 0, -100, -100, -100, -100]]
    )
    return ids, mask, labels


@pytest.mark.parametrize("kind", [example.BertCRF, WithGamma])
def test_base_checkpoint_gives_a_fresh_crf(base, kind):
    for _ in range(5):
        dirty_memory()
        crf = kind.from_pretrained(base, **NAMES).crf
        assert_fresh(crf)
        if kind is WithGamma:
            assert crf.gamma.item() == 2
            assert crf.gamma.requires_grad


@pytest.mark.parametrize("kind", [example.BertCRF, WithGamma])
def test_learnt_parameters_survive_saving(base, tmp_path, kind):
    model = kind.from_pretrained(base, **NAMES)
    randomize(model.crf)
    if kind is WithGamma:
        nn.init.constant_(model.crf.gamma, 0.7)
    model.save_pretrained(tmp_path)
    dirty_memory()
    again = kind.from_pretrained(tmp_path)
    assert again.crf.state_dict().keys() == model.crf.state_dict().keys()
    for name, tensor in model.crf.state_dict().items():
        assert torch.equal(again.crf.state_dict()[name], tensor), name
    assert_constrained(again.crf)
    ids, mask, labels = some_batch()
    assert torch.equal(again(ids, mask, labels=labels).loss, model(ids, mask, labels=labels).loss)


def test_only_missing_parameters_are_initialised(base, tmp_path):
    model = WithGamma.from_pretrained(base, **NAMES)
    randomize(model.crf)
    nn.init.constant_(model.crf.gamma, 0.7)
    model.save_pretrained(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    del state["crf.start_scores"]
    safetensors.save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    dirty_memory()
    again = WithGamma.from_pretrained(tmp_path).crf
    assert bool((again.start_scores == 0).all())
    assert torch.equal(again.transition_scores, model.crf.transition_scores)
    assert again.gamma.item() == pytest.approx(0.7)


def test_checkpoints_do_not_hold_the_constraints(base, tmp_path):
    model = example.BertCRF.from_pretrained(base, **NAMES)
    model.crf = CRF(len(LABELS))  # trained without constraints
    randomize(model.crf)
    model.save_pretrained(tmp_path)
    assert not any("allowed" in name for name in safetensors.load_file(tmp_path / "model.safetensors"))
    again = example.BertCRF.from_pretrained(tmp_path).crf
    assert_constrained(again)
    assert torch.equal(again.transition_scores, model.crf.transition_scores)


def test_constraints_of_an_old_checkpoint_are_ignored(base, tmp_path):
    model = example.BertCRF.from_pretrained(base, **NAMES)
    model.save_pretrained(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    for name, allowed in tag_constraints(LABELS)._asdict().items():
        state[f"crf.allowed_{name}"] = torch.ones_like(allowed)
    safetensors.save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_fresh(example.BertCRF.from_pretrained(tmp_path).crf)


def test_meta_device():
    gamma = nn.Parameter(torch.tensor(0.5))
    with torch.device("meta"):
        crf = CRF(len(LABELS), omega=bx.Negentropy(gamma), constraints=tag_constraints(LABELS))
    assert crf.transition_scores.is_meta
    dirty_memory()
    crf = crf.to_empty(device="cpu")
    for parameter in crf.parameters():
        parameter.data.fill_(float("nan"))
    crf.reset_parameters()
    assert_fresh(crf)
    assert crf.gamma.item() == 0.5
    tags = torch.tensor([1, 2, 0, 3])
    emissions = torch.randn(4, len(LABELS))
    expected = CRF(len(LABELS), gamma=0.5, constraints=tag_constraints(LABELS))
    torch.testing.assert_close(crf(emissions, tags), expected(emissions, tags))


def test_deferred_initialisation():
    """As in FSDP: build on the meta device, then each module resets its parameters."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, len(LABELS)), CRF(len(LABELS), constraints=tag_constraints(LABELS)))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert_fresh(model[1])
    loss = model[1](model[0](torch.randn(2, 4, 3)), torch.zeros(2, 4, dtype=torch.int64))
    assert bool(loss.isfinite())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_attention_mask_of_the_tokenizer(dtype):
    crf, emissions = CRF(len(LABELS), constraints=tag_constraints(LABELS)), torch.randn(3, 6, len(LABELS))
    randomize(crf)
    _, mask, _ = some_batch()
    tags = torch.zeros(3, 6, dtype=torch.int64)
    assert torch.equal(crf(emissions, tags, mask=mask.to(dtype)), crf(emissions, tags, mask=mask.bool()))
    assert torch.equal(crf.decode(emissions, mask=mask.to(dtype)), crf.decode(emissions, mask=mask.bool()))
    assert torch.equal(crf.marginals(emissions, mask=mask.to(dtype)), crf.marginals(emissions, mask=mask.bool()))


def test_labels_mask_like_a_mask():
    crf, emissions = CRF(len(LABELS), constraints=tag_constraints(LABELS)), torch.randn(3, 6, len(LABELS))
    _, mask, labels = some_batch()
    alone = crf(emissions, labels)
    assert torch.equal(crf(emissions, labels, mask=mask), alone)
    assert torch.equal(crf(emissions, labels.clamp(min=0), mask=labels != -100), alone)


@pytest.mark.parametrize(
    ("reduction", "compiled"),
    [("mean", False), ("sum", False), ("token_mean", False), ("mean", True), ("token_mean", True)],
)
def test_rows_without_labels_have_no_effect(reduction, compiled):
    crf = CRF(len(LABELS), constraints=tag_constraints(LABELS))
    randomize(crf)
    _, _, labels = some_batch()
    labels = torch.cat((labels, torch.full((2, 6), -100)))[[3, 0, 1, 4, 2]]
    labelled = [1, 2, 4]
    emissions = torch.randn(5, 6, len(LABELS), requires_grad=True)
    call = torch.compile(crf, backend="aot_eager", fullgraph=True) if compiled else crf
    loss = call(emissions, labels, reduction=reduction)
    expected = crf(emissions[labelled], labels[labelled], reduction=reduction)
    torch.testing.assert_close(loss, expected)
    got, wanted = (torch.autograd.grad(value, (emissions, *crf.parameters())) for value in (loss, expected))
    torch.testing.assert_close(got, wanted)
    assert bool((got[0][[0, 3]] == 0).all())


@pytest.mark.parametrize("reduction", ["mean", "sum", "token_mean"])
def test_batch_without_labels(reduction):
    """The gradient of a batch without labels is 0, not NaN."""
    crf = CRF(len(LABELS))
    emissions = torch.randn(2, 3, len(LABELS), requires_grad=True)
    loss = crf(emissions, torch.full((2, 3), -100), reduction=reduction)
    assert loss.item() == 0
    gradients = torch.autograd.grad(loss, (emissions, *crf.parameters()))
    assert all(bool((gradient == 0).all()) for gradient in gradients)


def test_accumulated_batches_are_one_batch():
    """``sum`` divided by the number of labels of all micro-batches is ``token_mean`` of the whole batch."""
    crf, emissions = CRF(len(LABELS), constraints=tag_constraints(LABELS)), torch.randn(3, 6, len(LABELS))
    _, _, labels = some_batch()
    count = (labels != -100).sum()
    parts = [crf(e, t, reduction="sum") / count for e, t in zip(emissions.split(2), labels.split(2), strict=True)]
    torch.testing.assert_close(sum(parts), crf(emissions, labels, reduction="token_mean"))


class Accumulated(example.BertCRF):
    def forward(
        self, input_ids, attention_mask=None, token_type_ids=None, labels=None, num_items_in_batch=None, **kwargs
    ):
        logits = super().forward(input_ids, attention_mask, token_type_ids).logits
        return hf.modeling_outputs.TokenClassifierOutput(
            loss=self.crf(logits, labels, reduction="sum") / num_items_in_batch, logits=logits
        )


def test_trainer_accumulates_batches(tmp_path):
    """Four micro-batches of two, with uneven lengths and one without labels, give the step of one batch of eight."""
    ids, mask, labels = (torch.cat((tensor,) * 3)[:8] for tensor in some_batch())
    labels[5] = -100
    rows = [{"input_ids": i, "attention_mask": m, "labels": t} for i, m, t in zip(ids, mask, labels, strict=True)]
    states = []
    for size, parts in ((8, 1), (2, 4)):
        hf.set_seed(0)
        config = hf.BertConfig(**SIZE, **NAMES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = Accumulated(config)
        arguments = hf.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=parts,
            max_steps=2,
            max_grad_norm=0.0,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        # SGD: Adam would hide a factor
        optimizers = torch.optim.SGD(model.parameters(), lr=0.1), None
        trainer = hf.Trainer(model, arguments, train_dataset=rows, optimizers=optimizers)
        trainer.train()
        states.append(model.state_dict())
    torch.testing.assert_close(states[0], states[1], rtol=1e-4, atol=1e-6)
    assert bool((states[0]["crf.transition_scores"] != 0).any())


@pytest.fixture
def tagger():
    """An untrained model with a random CRF, and a tokenizer that truncates to 16 tokens."""
    hf.set_seed(0)
    tokenizer = example.make_tokenizer()
    tokenizer.model_max_length = 16
    config = hf.BertConfig(**SIZE | {"vocab_size": len(tokenizer)}, **NAMES, max_position_embeddings=16)
    model = example.BertCRF(config).eval()
    randomize(model.crf)
    return model, tokenizer


def sentences(count):
    rng = random.Random(0)
    return [example.make_sentence(rng) for _ in range(count)]


def test_a_bert_tokenizer_gives_token_types_that_reach_bert(tagger):
    model, tokenizer = tagger
    assert type(tokenizer) is hf.BertTokenizer
    batch = tokenizer(["today bade slept"], return_tensors="pt")
    assert "token_type_ids" in batch
    second = batch | {"token_type_ids": torch.ones_like(batch["token_type_ids"])}
    assert not torch.allclose(model(**batch).logits, model(**second).logits)
    assert [len(tags) for tags in example.tag(model, tokenizer, [["today", "bade"], ["met"]])] == [2, 1]


def test_words_beyond_the_maximum_length_get_no_tag(tagger):
    model, tokenizer = tagger
    (tags,) = example.tag(model, tokenizer, [["bade"] * 10])  # two pieces each, and two special ones
    assert all(tags[:7])
    assert tags[7:] == [None] * 3
    encoded = example.encode(tokenizer, ["bade"] * 10, ["O"] * 10)
    assert {len(column) for column in encoded.values()} == {16}


def test_trainer_evaluates_and_predicts_what_the_crf_decodes(tagger, tmp_path):
    model, tokenizer = tagger
    corpus = sentences(5)
    rows = [example.encode(tokenizer, *pair) for pair in corpus]
    trainer = example.train(model, tokenizer, rows, tmp_path, 1, 0)
    trainer.args.per_device_eval_batch_size = 2  # joins batches of different lengths
    predicted = trainer.predict(rows)
    wanted = example.tag(model, tokenizer, [words for words, _ in corpus])
    for prediction, row, tags in zip(predicted.predictions, rows, wanted, strict=True):
        is_labelled = torch.tensor(row["labels"]) != -100
        assert [LABELS[n] for n in prediction[: len(is_labelled)][is_labelled]] == [tag for tag in tags if tag]
    is_labelled = [len([tag for tag in tags if tag]) for tags in wanted]
    gold = [tags[:n] for (_, tags), n in zip(corpus, is_labelled, strict=True)]
    expected = seqeval.f1_score(gold, [tags[:n] for tags, n in zip(wanted, is_labelled, strict=True)])
    assert predicted.metrics["test_f1"] == trainer.evaluate(rows)["eval_f1"] == expected


def test_example(tmp_path, capsys):
    accuracy = example.main(["--epochs", "5", "--output", str(tmp_path)])
    score, *tagged, last = capsys.readouterr().out.splitlines()
    assert float(score.removeprefix("F1 of entities on held-out sentences: ")) > 0.95
    assert accuracy > 0.97
    assert len(tagged) == 3
    assert "held-out" in last
    assert all(piece.rpartition("/")[2] in LABELS for line in tagged for piece in line.split())
    assert {path.name for path in tmp_path.iterdir()} == {"base", "tagger"}  # no checkpoints


def test_example_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        example.main(["--help"])
    assert "--epochs" in capsys.readouterr().out
