"""``--adapter`` from the command line."""

from __future__ import annotations

import pytest

from mlx_stream.cache_prompt import cache_prompt
from mlx_stream.prerouter.spec import LoraSpec
from tests.adapters.making import SCALE, publish, random_pairs, save_mlx, shapes
from tests.cli.runner import assert_failed
from tests.prerouter.making import form, random_heads, with_heads

PROMPT = ("--prompt", "1 2 3 4 5 6 7 8 9", "--max-tokens", "6", "--backend", "cpu")


@pytest.fixture
def pairs(bare, stock):
    return random_pairs(shapes(stock(bare), lambda path: "self_attn" in path), 1)


def test_an_adapter_of_either_form_changes_the_answer(invoke, bare, pairs, tmp_path):
    plain = invoke("--model", bare, *PROMPT)
    folder = save_mlx(tmp_path / "adapter", pairs, 4)
    file = publish(tmp_path / "lora.safetensors", pairs)
    adapted = invoke("--model", bare, *PROMPT, "--adapter", folder)
    published = ("--adapter", file, "--adapter-scale", SCALE)
    assert adapted.returncode == 0, adapted.stderr
    assert adapted.stdout != plain.stdout
    assert invoke("--model", bare, *PROMPT, *published).stdout == adapted.stdout
    assert invoke("--model", bare, *PROMPT, "--adapter", "off").stdout == plain.stdout


def test_a_bad_adapter_is_an_error(invoke, bare, pairs, tmp_path):
    file = publish(tmp_path / "lora.safetensors", pairs)
    result = invoke("--model", bare, *PROMPT, "--adapter", file)
    assert_failed(result, "does not say its scale", "--adapter-scale")
    assert_failed(
        invoke("--model", bare, *PROMPT, "--adapter", tmp_path / "none"), "cannot be read"
    )


def test_a_cached_prompt_remembers_its_adapter(invoke, bare, pairs, tmp_path):
    folder, kept = save_mlx(tmp_path / "adapter", pairs, 4), tmp_path / "kept.safetensors"
    made = ("--model", bare, "--prompt", "1 2 3 4", "--prompt-cache-file", kept)
    result = invoke(*made, "--adapter", folder, command=cache_prompt)
    assert result.returncode == 0, result.stderr
    more = ("--model", bare, *PROMPT, "--prompt-cache-file", kept)
    refused = invoke(*more)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "belongs to another model" in refused.stderr
    assert invoke(*more, "--adapter", folder).returncode == 0


def test_the_prerouters_own_adapter_is_on_with_it(invoke, checkpoint, stock, tmp_path):
    plain = checkpoint("qwen3_moe", changes={"mlp_only_layers": []})
    lora = LoraSpec("lora.safetensors", 8.0, 4)
    spec = form("35b", range(3), range(1, 4), lora=lora)
    model = with_heads(plain, tmp_path / "model", spec, random_heads(spec, 128, 8))
    result = invoke("--model", model, *PROMPT)
    assert_failed(result, "the adapter cannot be read", "lora.safetensors")
    pairs = random_pairs(shapes(stock(plain), lambda path: "self_attn" in path), 1)
    publish(model / lora.file, pairs)
    runs = {
        name: invoke("--model", model, *PROMPT, *flags).stdout
        for name, flags in {
            "both": (),
            "named": ("--adapter", model / lora.file),
            "heads": ("--adapter", "off"),
            "neither": ("--prerouter", "off"),
            "base": ("--prerouter", "off", "--adapter", "off"),
        }.items()
    }
    assert runs["both"] == runs["named"]
    assert runs["neither"] == runs["base"]
    assert len({runs[n] for n in ("both", "heads", "neither")}) == 3
