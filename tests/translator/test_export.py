"""Exports: every weight where the other toolkit looks for it, what it can't express refused, and the same tokens.

The comparisons with the toolkits themselves are skipped where these aren't installed; the rest always runs.
"""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.helpers import ENGLISH, VOCABULARY, tiny_checkpoint, tiny_model, tiny_tokenizer
from translator import cli
from translator.attention import STRUCTURES
from translator.checkpoint import DEFAULT_CHECKPOINT, Checkpoint, read_checkpoint, write_checkpoint
from translator.config import DecodeConfig
from translator.errors import UserError
from translator.export import FORMATS, export_checkpoint
from translator.padding import pad, padding
from translator.pipeline import Translator
from translator.tokenizer import Tokenizer

COMMON = {"README.md", "config.json", "tokenizer.model"}
TOOLKITS = [to for to in FORMATS if to != "packed"]  # that one is this program's own
PAD, START, END = 0, 2, 3


def refusal(checkpoint: Checkpoint, to: str, output: Path) -> str:
    """The one line of an export that fails, and leaves nothing behind."""
    place = next(folder for folder in output.parents if folder.is_dir())
    there = sorted(place.iterdir())
    with pytest.raises(UserError) as caught:
        export_checkpoint(checkpoint, to, output)
    assert sorted(place.iterdir()) == there
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_decode(**settings: Any) -> Checkpoint:
    return tiny_checkpoint(DecodeConfig(**settings))


# -- transformers ------------------------------------------------------------------------------------------------------


def test_transformers_has_the_files_and_settings_that_its_class_reads(tmp_path: Path) -> None:
    export_checkpoint(with_decode(beam_size=3, length_penalty=0.5), "transformers", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *COMMON,
        "generation_config.json",
        "model.safetensors",
    }
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    model = tiny_model().config
    expected = {
        "architectures": ["BlenderbotForConditionalGeneration"],
        "model_type": "blenderbot",
        "vocab_size": VOCABULARY,
        "d_model": model.d_model,
        "encoder_layers": model.num_encoder_layers,
        "decoder_layers": model.num_decoder_layers,
        "encoder_attention_heads": model.nhead,
        "decoder_attention_heads": model.nhead,
        "encoder_ffn_dim": model.dim_feedforward,
        "decoder_ffn_dim": model.dim_feedforward,
        "max_position_embeddings": model.max_positions,
        "activation_function": "relu",
        "scale_embedding": True,
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "bos_token_id": START,
        "eos_token_id": END,
        "decoder_start_token_id": START,
        "forced_eos_token_id": None,  # 2, the class's default, is the start token here
        "encoder_no_repeat_ngram_size": 0,
    }
    assert {name: config[name] for name in expected} == expected
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["num_beams"], generation["length_penalty"], generation["do_sample"]) == (3, 0.5, False)
    assert generation["max_length"] == model.max_positions + 1 and generation["decoder_start_token_id"] == START
    assert generation["suppress_tokens"] == [PAD, START]
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == tiny_tokenizer().model


def test_transformers_has_each_weight_under_its_name_there(tmp_path: Path) -> None:
    export_checkpoint(tiny_checkpoint(), "transformers", tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as tensors:
        assert tensors.metadata() == {"format": "pt"}  # without it the library refuses the file
        found = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - not a dict
    mine = tiny_model().state_dict()
    width = tiny_model().config.d_model
    assert torch.equal(found["model.shared.weight"], mine["embedding.weight"])
    assert not found["final_logits_bias"].any() and found["final_logits_bias"].shape == (1, VOCABULARY)
    for side, own in (("encoder", "source"), ("decoder", "target")):
        assert torch.equal(found[f"model.{side}.embed_positions.weight"], mine[f"{own}_positions.weight"])
        assert torch.equal(found[f"model.{side}.layer_norm.bias"], mine[f"{side}.norm.bias"])
    for third, name in enumerate("qkv"):
        rows = slice(third * width, (third + 1) * width)
        for theirs, ours in (
            ("encoder.layers.1.self_attn", "encoder.layers.1.self_attn"),
            ("decoder.layers.0.self_attn", "decoder.layers.0.self_attn"),
            ("decoder.layers.1.encoder_attn", "decoder.layers.1.multihead_attn"),
        ):
            assert torch.equal(found[f"model.{theirs}.{name}_proj.weight"], mine[f"{ours}.in_proj_weight"][rows])
            assert torch.equal(found[f"model.{theirs}.{name}_proj.bias"], mine[f"{ours}.in_proj_bias"][rows])
    names = {"self_attn_layer_norm": "norm1", "encoder_attn_layer_norm": "norm2", "final_layer_norm": "norm3"}
    for theirs, ours in {**names, "fc1": "linear1", "fc2": "linear2"}.items():
        assert torch.equal(found[f"model.decoder.layers.1.{theirs}.weight"], mine[f"decoder.layers.1.{ours}.weight"])
    assert torch.equal(found["model.encoder.layers.0.final_layer_norm.bias"], mine["encoder.layers.0.norm2.bias"])
    # All of the model, and nothing twice but what is zero there.
    assert sum(map(torch.numel, found.values())) == sum(map(torch.numel, mine.values())) + VOCABULARY


def test_transformers_gets_sinusoidal_positions_as_a_table(tmp_path: Path) -> None:
    model = tiny_model(positions="sinusoidal")
    export_checkpoint(tiny_checkpoint(model=model), "transformers", tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as tensors:
        table = tensors.get_tensor("model.decoder.embed_positions.weight")
    assert torch.equal(table, model.target_positions.weight)
    assert table[0].tolist() == [0.0] * 16 + [1.0] * 16  # the first token's


def test_transformers_samples_where_the_checkpoint_does(tmp_path: Path) -> None:
    export_checkpoint(with_decode(sampling=True, top_k=5, temperature=0.7), "transformers", tmp_path / "out")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["do_sample"], generation["num_beams"], generation["top_k"]) == (True, 1, 5)


# -- ctranslate2, with something in its place --------------------------------------------------------------------------


class Recorded(SimpleNamespace):
    """Any part of a specification: takes whatever attribute is set, makes parts that are asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        part = Parts() if name in ("embeddings", "linear", "layer") else Recorded()
        setattr(self, name, part)
        return part


class Parts(Recorded):
    """A part that is a list of parts as well."""

    def __init__(self, count: int = 1) -> None:
        super().__init__(members=[Recorded() for _ in range(count)])

    def __getitem__(self, index: int) -> Any:
        return self.members[index]

    def __iter__(self) -> Any:
        return iter(self.members)


class Specification(Recorded):
    """`TransformerSpec`: keeps what it was made from, and writes one file."""

    @classmethod
    def from_config(cls, layers: tuple[int, int], heads: int, **options: Any) -> "Specification":
        made = cls(made_from=(layers, heads, options), config=Recorded(), vocabularies=[])
        for side, count, attentions in (
            (made.encoder, layers[0], {"self_attention": 2}),
            (made.decoder, layers[1], {"self_attention": 2, "attention": 3}),
        ):
            side.layer = Parts(count)
            for layer in side.layer:
                for name, products in attentions.items():
                    getattr(layer, name).linear = Parts(products)
        return made

    def register_source_vocabulary(self, tokens: list[str]) -> None:
        self.vocabularies.append(tokens)

    register_target_vocabulary = register_source_vocabulary

    def validate(self) -> None:
        self.validated = True

    def optimize(self) -> None:
        self.optimized = True

    def save(self, folder: str) -> None:
        (Path(folder) / "model.bin").write_bytes(b"")
        (Path(folder) / "config.json").write_bytes(b"{}")
        saved.append(self)


saved: list[Any] = []


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Puts a module in the place of `ctranslate2` that records what it is told; the specifications saved."""
    module: Any = ModuleType("ctranslate2")
    module.specs = SimpleNamespace(
        TransformerSpec=Specification, Activation=SimpleNamespace(RELU="relu there", GELU="gelu there")
    )
    monkeypatch.setitem(sys.modules, "ctranslate2", module)
    saved.clear()
    return saved


def test_ctranslate2_gets_each_weight_and_the_vocabulary(stand_in: list[Any], tmp_path: Path) -> None:
    export_checkpoint(tiny_checkpoint(), "ctranslate2", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*COMMON, "model.bin"}
    [spec] = stand_in
    layers, heads, options = spec.made_from
    assert (layers, heads) == ((2, 2), 4) and options == {"pre_norm": True, "activation": "relu there"}
    assert spec.validated and spec.optimized
    pieces = tiny_tokenizer().pieces(list(range(VOCABULARY)))
    assert spec.vocabularies == [pieces, pieces]
    settings = vars(spec.config)
    assert settings == {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "decoder_start_token": "<s>",
        "add_source_bos": False,
        "add_source_eos": True,
        "layer_norm_epsilon": 1e-5,
    }
    mine = {name: tensor.numpy() for name, tensor in tiny_model().state_dict().items()}
    same = lambda array, name: (array == mine[name]).all() and array.shape == mine[name].shape  # noqa: E731
    for array in (spec.encoder.embeddings[0].weight, spec.decoder.embeddings.weight, spec.decoder.projection.weight):
        assert same(array, "embedding.weight")
    assert spec.decoder.projection.bias.tolist() == [0.0] * VOCABULARY
    assert same(spec.encoder.position_encodings.encodings, "source_positions.weight")
    assert same(spec.decoder.position_encodings.encodings, "target_positions.weight")
    assert same(spec.encoder.layer_norm.gamma, "encoder.norm.weight")
    assert same(spec.decoder.layer_norm.beta, "decoder.norm.bias")
    first, last = spec.encoder.layer[0], spec.decoder.layer[1]
    width = tiny_model().config.d_model
    assert same(first.self_attention.linear[0].weight, "encoder.layers.0.self_attn.in_proj_weight")
    assert same(first.self_attention.layer_norm.gamma, "encoder.layers.0.norm1.weight")
    assert same(first.ffn.layer_norm.gamma, "encoder.layers.0.norm2.weight")
    assert same(first.ffn.linear_1.weight, "encoder.layers.0.linear2.weight")
    assert same(last.self_attention.linear[1].bias, "decoder.layers.1.self_attn.out_proj.bias")
    cross = mine["decoder.layers.1.multihead_attn.in_proj_weight"]
    assert (last.attention.linear[0].weight == cross[:width]).all()
    assert (last.attention.linear[1].weight == cross[width:]).all()
    assert same(last.attention.linear[2].weight, "decoder.layers.1.multihead_attn.out_proj.weight")
    assert same(last.attention.layer_norm.beta, "decoder.layers.1.norm2.bias")
    assert same(last.ffn.layer_norm.beta, "decoder.layers.1.norm3.bias")
    assert same(last.ffn.linear_0.bias, "decoder.layers.1.linear1.bias")


def test_ctranslate2_gets_the_activation_and_the_epsilon(stand_in: list[Any], tmp_path: Path) -> None:
    model = tiny_model(activation="gelu", layer_norm_eps=1e-6)
    export_checkpoint(tiny_checkpoint(model=model), "ctranslate2", tmp_path / "out")
    assert stand_in[0].made_from[2]["activation"] == "gelu there"
    assert stand_in[0].config.layer_norm_epsilon == 1e-6


def test_ctranslate2_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    assert "pip install ctranslate2" in refusal(tiny_checkpoint(), "ctranslate2", tmp_path / "out")


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", TOOLKITS)
def test_another_structure_is_refused_by_name(
    to: str, stand_in: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(STRUCTURES, "mine", STRUCTURES["multihead"])
    message = refusal(tiny_checkpoint(model=tiny_model(attention="mine")), to, tmp_path / "out")
    assert f"--to {to}" in message and "attention = 'mine'" in message


def test_what_transformers_cannot_express_is_refused_by_name(tmp_path: Path) -> None:
    odd = tiny_checkpoint(model=tiny_model(layer_norm_eps=1e-6))
    assert "layer_norm_eps = 1e-06" in refusal(odd, "transformers", tmp_path / "out")
    assert "search = 'mine'" in refusal(with_decode(search="mine"), "transformers", tmp_path / "out")


def test_an_output_that_holds_something_or_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file", "file/in", "zero\0byte", "x" * 300):
        assert name[:4] in refusal(tiny_checkpoint(), "transformers", tmp_path / name)
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"


def test_an_empty_folder_is_filled_and_a_link_to_one_followed(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    export_checkpoint(tiny_checkpoint(), "transformers", tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty" / "model.safetensors").exists()


def test_a_write_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(path: Path, data: bytes) -> None:
        if path.name == "README.md":
            raise UserError(f"{path}: cannot be written: No space left on device")
        path.write_bytes(data)

    monkeypatch.setattr("translator.export.to_transformers.atomic_write_bytes", full)
    assert "No space left" in refusal(tiny_checkpoint(), "transformers", tmp_path / "out")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def status(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["translator", "export", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    (tmp_path / "tiny").mkdir()
    write_checkpoint(tmp_path / "tiny", tiny_checkpoint())
    monkeypatch.chdir(tmp_path)
    assert status("--checkpoint", "tiny", "--to", "transformers", "out") == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    capfd.readouterr()
    assert status("--checkpoint", "tiny", "--to", "transformers", "out") == 2
    assert "translator: error: out: holds something already" in capfd.readouterr().err
    assert status("--checkpoint", "tiny", "--to", "onnx", "new") == 2
    assert "known: ctranslate2, packed, transformers" in capfd.readouterr().err
    assert not (tmp_path / "new").exists()


# -- beside the toolkits themselves ------------------------------------------------------------------------------------

MODELS: dict[str, dict[str, Any]] = {
    "learned": {},
    "sinusoidal, gelu": {"positions": "sinusoidal", "activation": "gelu"},
}
NO_ENCODER = {"num_encoder_layers": 0, "num_decoder_layers": 3}
SHIPPED = pytest.mark.skipif(not DEFAULT_CHECKPOINT.exists(), reason="no model is shipped in this checkout")
LIMIT = 40


def ours(checkpoint: Checkpoint, beams: int) -> tuple[list[list[int]], list[list[int]]]:
    """Source ids and the tokens found for each of the sentences, `LIMIT` at most."""
    limits = {"max_length_factor": 0.0, "max_length_extra": LIMIT}
    found = Translator(checkpoint).candidates(ENGLISH, split=False, beam_size=beams, **limits)
    sources = [[*checkpoint.tokenizer.encode(line), END] for line in ENGLISH]
    return sources, [checkpoint.tokenizer.ids(one.tokens[0]) for [one] in found]


def transformers_finds(folder: Path, sources: list[list[int]], beams: int) -> list[list[int]]:
    """The tokens that it finds, without the start token and what it fills up with."""
    model = pytest.importorskip("transformers").AutoModelForSeq2SeqLM.from_pretrained(folder)
    found = []
    for source in sources:
        [tokens] = model.generate(torch.tensor([source]), num_beams=beams, max_length=LIMIT + 1).tolist()
        found.append(tokens[1 : tokens.index(END) + 1 if END in tokens else None])
    return found


def ctranslate2_finds(folder: Path, sources: list[list[int]], beams: int) -> list[list[int]]:
    """The tokens that it finds; of its own accord it ends each source."""
    translator = pytest.importorskip("ctranslate2").Translator(str(folder), compute_type="float32")
    tokenizer = Tokenizer.load(folder / "tokenizer.model")
    results = translator.translate_batch(
        [tokenizer.pieces(source[:-1]) for source in sources],
        beam_size=beams,
        max_decoding_length=LIMIT,
        suppress_sequences=[["<pad>"], ["<s>"]],
        return_end_token=True,
    )
    return [tokenizer.ids(result.hypotheses[0]) for result in results]


FINDS = {"ctranslate2": ctranslate2_finds, "transformers": transformers_finds}


@pytest.mark.parametrize("changes", [*MODELS.values(), NO_ENCODER], ids=[*MODELS, "no encoder"])
def test_transformers_computes_the_same_logits(changes: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    checkpoint = tiny_checkpoint(model=tiny_model(**changes))
    export_checkpoint(checkpoint, "transformers", tmp_path / "out")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    sources, targets = ours(checkpoint, 1)
    ids, hidden = pad(sources, PAD), padding([len(source) for source in sources])
    given = pad([[START, *target] for target in targets], PAD)
    with torch.inference_mode():
        theirs = model(input_ids=ids, attention_mask=(~hidden).long(), decoder_input_ids=given).logits
        assert (theirs - checkpoint.model(ids, given, hidden)).abs().max() < 1e-4


@pytest.mark.parametrize("changes", [*MODELS.values(), {"layer_norm_eps": 1e-2}], ids=[*MODELS, "epsilon"])
def test_ctranslate2_gives_the_same_scores(changes: dict[str, Any], tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    checkpoint = tiny_checkpoint(model=tiny_model(**changes))
    export_checkpoint(checkpoint, "ctranslate2", tmp_path / "out")
    translator = ctranslate2.Translator(str(tmp_path / "out"), compute_type="float32")
    sources, targets = ours(checkpoint, 1)
    pieces = checkpoint.tokenizer.pieces
    scored = translator.score_batch(  # it adds the end token itself
        [pieces(source[:-1]) for source in sources], [pieces(target[:-1]) for target in targets]
    )
    for source, target, score in zip(sources, targets, scored, strict=True):
        whole = torch.tensor([[*target[:-1], END]])
        given = whole.roll(1, dims=1)
        given[0, 0] = START
        log_probs = checkpoint.model(torch.tensor([source]), given).log_softmax(-1)
        mine = log_probs.gather(2, whole.unsqueeze(2)).flatten()
        assert (mine - torch.tensor(score.log_probs)).abs().max() < 1e-4


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("to", TOOLKITS)
def test_a_random_model_finds_the_same_tokens_there(to: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Greedy: what a beam search does with targets cut at the limit is each toolkit's own affair."""
    pytest.importorskip(to)
    checkpoint = tiny_checkpoint(model=tiny_model(**changes))
    export_checkpoint(checkpoint, to, tmp_path / "out")
    sources, targets = ours(checkpoint, 1)
    assert FINDS[to](tmp_path / "out", sources, 1) == targets


@SHIPPED
@pytest.mark.parametrize("to", TOOLKITS)
def test_the_shipped_model_finds_the_same_tokens_there(to: str, tmp_path: Path) -> None:
    pytest.importorskip(to)
    checkpoint = read_checkpoint(DEFAULT_CHECKPOINT)
    export_checkpoint(checkpoint, to, tmp_path / "out")
    sources, targets = ours(checkpoint, 4)
    assert all(target[-1] == END for target in targets)
    assert FINDS[to](tmp_path / "out", sources, 4) == targets


def test_ctranslate2_takes_no_model_without_an_encoder(stand_in: list[Any], tmp_path: Path) -> None:
    model = tiny_model(**NO_ENCODER)
    assert "num_encoder_layers = 0" in refusal(tiny_checkpoint(model=model), "ctranslate2", tmp_path / "out")
