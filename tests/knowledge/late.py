"""A small random late-interaction model, and documents for it."""

from __future__ import annotations

import functools
import pathlib
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float32
from PIL import Image

from routerl_jax.models.config import Prompts
from routerl_jax.models.families.colqwen import LateInteraction, LateInteractionConfig
from routerl_jax.models.images import ImageProcessor
from routerl_jax.parallel.mesh import single_device_mesh
from tests import seeing


@functools.cache
def model() -> LateInteraction:
    """Two layers, vectors of 24; a page takes about 25 tokens, and its vectors follow from its pixels."""
    config = LateInteractionConfig(
        backbone=seeing.config(),
        dim=24,
        query_padding=2,
        page_prompt=f"{seeing.MARKER} page",
        prompts=Prompts(query="Question: "),
    )
    made = nnx.eval_shape(lambda: LateInteraction(config, jax.random.key(0)))
    rng = np.random.default_rng(1)

    def draw(path: tuple[object, ...], leaf: nnx.Param) -> nnx.Param:  # jax would compile a program for every shape
        norm = "norm" in str(path[-1]) and "bias" not in str(path[-1])
        values = np.ones(leaf.shape) if norm else 0.2 * rng.normal(size=leaf.shape)
        return leaf.replace(jnp.asarray(values, jnp.float32))

    nnx.update(made, nnx.map_state(draw, nnx.state(made, nnx.Param)))
    made.tokenizer = seeing.tokenizer()
    made.tokenizer.hf.pad_token = made.tokenizer.hf.pad_token or made.tokenizer.hf.eos_token
    made.backbone.image_processor = ImageProcessor(patch_size=4, min_pixels=64, max_pixels=40 * 40, window=16)
    made.mesh = single_device_mesh()
    return made


def write_picture(path: pathlib.Path, seed: int, size: tuple[int, int] = (48, 64)) -> pathlib.Path:
    """A picture of random coloured squares."""
    rng = np.random.default_rng(seed)
    squares = rng.integers(0, 256, (size[0] // 8, size[1] // 8, 3)).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(squares.repeat(8, 0).repeat(8, 1)).save(path)
    return path


def write_pdf(path: pathlib.Path, pages: list[str], *, locked: bool = False) -> pathlib.Path:
    """A PDF by hand: a line of Helvetica on every page, 200 x 100 points. A locked one opens with no password that anybody has
    (its content is not even encrypted)."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for text in pages:
        content = zlib.compress(f"BT /F1 18 Tf 20 45 Td ({text}) Tj ET".encode())
        objects.append(b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(content), content))
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 100] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % len(objects)
        )
        kids.append(b"%d 0 R" % len(objects))
    objects[1] = b"<< /Type /Pages /Kids [%s] /Count %d >>" % (b" ".join(kids), len(kids))
    protection = b""
    if locked:  # PDF 1.4, section 3.5: hashes of an owner's and a user's password
        hashes = b"<%s>" % (b"5a" * 32)
        objects.append(b"<< /Filter /Standard /V 1 /R 2 /P -4 /O %s /U %s >>" % (hashes, hashes))
        protection = b" /Encrypt %d 0 R /ID [<00> <00>]" % len(objects)
    file, starts = bytearray(b"%PDF-1.4\n"), []
    for number, content in enumerate(objects, 1):
        starts.append(len(file))
        file += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % start for start in starts)
    size = len(objects) + 1
    file += b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d /Root 1 0 R%s >>\nstartxref\n%d\n%%%%EOF\n" % (
        size,
        table,
        size,
        protection,
        len(file),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file)
    return path


def max_similarity(
    queries: Sequence[Float32[np.ndarray, "n E"]], pages: Sequence[Float32[np.ndarray, "m E"]]
) -> Float32[np.ndarray, "Q P"]:
    """Late-interaction scores of all queries for all pages: sums of best matches (arXiv 2004.12832, equation 3)."""
    return np.asarray([[(query @ page.T).max(axis=1).sum() for page in pages] for query in queries], np.float32)
