"""Pictures: whatever comes is decoded or refused by name; patches equal those of transformers' processor, value by value."""

from __future__ import annotations

import io
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as their_resize
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from routerl_jax.models.config import UnsupportedModelError, VisionConfig
from routerl_jax.models.images import ImageProcessor, crop, decode_image, image_digest, processor_from_hf, smart_resize
from routerl_jax.models.patches import arrange, blank, concatenate, place_images
from routerl_jax.parallel.mesh import make_mesh

_RNG = np.random.default_rng(7)
_PIXELS = _RNG.integers(0, 256, (48, 64, 3), np.uint8)
_SMOOTH = np.stack(np.meshgrid(np.arange(64) * 4, np.arange(48) * 5), -1)[:, :, [0, 1, 1]].astype(np.uint8)


def _encode(image: Image.Image | np.ndarray, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_every_way_to_hand_over_a_picture(tmp_path):
    png = _encode(_PIXELS, "PNG")
    path = tmp_path / "picture.png"
    path.write_bytes(png)
    sources = [
        png,
        bytearray(png),
        path,
        str(path),
        Image.open(path),
        _PIXELS,
        np.dstack([_PIXELS, np.full((48, 64), 255, np.uint8)]),
    ]
    sources += [(_PIXELS / 255).astype(np.float32), _PIXELS.astype(np.uint16) * 257]
    for source in sources:
        image = decode_image(source)
        assert image.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(image), _PIXELS)
    grey = _PIXELS[:, :, 0]
    for source in (grey, grey[:, :, None]):
        np.testing.assert_array_equal(np.asarray(decode_image(source)), np.repeat(grey[:, :, None], 3, 2))
    np.testing.assert_array_equal(np.asarray(decode_image(grey > 99))[:, :, 0], (grey > 99) * 255)


def test_sixteen_bits_are_scaled_and_not_clipped():
    levels = np.arange(48 * 64).reshape(48, 64) * 21  # to 64491
    expected = np.rint(levels / 257)
    for kind in ("PNG", "TIFF"):
        data = _encode(levels.astype(np.uint16), kind)
        np.testing.assert_array_equal(np.asarray(decode_image(data))[:, :, 2], expected)
    np.testing.assert_array_equal(np.asarray(decode_image(Image.fromarray(levels.astype(np.int32))))[:, :, 0], expected)
    fractions = (levels / 65535).astype(np.float32)  # mode F
    np.testing.assert_array_equal(np.asarray(decode_image(_encode(fractions, "TIFF")))[:, :, 1], expected)
    with pytest.raises(ValueError, match=r"scan.tif: values from 0 to 215110 in mode I; save it with 8 or 16 bits"):
        decode_image(Image.fromarray((np.arange(3) * 107555).astype(np.int32)[None]), name="scan.tif")


def test_cmyk_jpeg_looks_like_its_rgb_source():
    data = _encode(Image.fromarray(_SMOOTH).convert("CMYK"), "JPEG", quality=95)
    assert Image.open(io.BytesIO(data)).mode == "CMYK"
    difference = np.asarray(decode_image(data)).astype(int) - _SMOOTH
    assert np.abs(difference).mean() < 3  # lossy, but no inversion


def test_transparency_lies_on_white():
    alpha = np.zeros((4, 4), np.uint8)
    alpha[:2] = 255
    alpha[3] = 128
    red = np.dstack([np.full((4, 4), 200, np.uint8), np.zeros((4, 4, 2), np.uint8), alpha])
    expected = {0: (200, 0, 0), 2: (255, 255, 255), 3: (227, 127, 127)}  # half of red, half of white, rounded down
    palette = Image.fromarray(red).quantize(8)
    for data in (_encode(red, "PNG"), _encode(palette, "PNG"), red):
        found = np.asarray(decode_image(data))
        for row, colour in expected.items():
            assert np.abs(found[row, 1].astype(int) - colour).max() <= 1
    grey = Image.fromarray(np.dstack([np.full((4, 4), 9, np.uint8), alpha]), "LA")
    assert np.asarray(decode_image(_encode(grey, "PNG")))[[0, 2], 0].tolist() == [[9, 9, 9], [255, 255, 255]]
    keyed = Image.new("P", (2, 1), 0)
    keyed.putpalette([10, 20, 30, 40, 50, 60])
    keyed.putpixel((1, 0), 1)
    for kind in ("PNG", "GIF"):
        found = np.asarray(decode_image(_encode(keyed, kind, transparency=1)))
        assert found.tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_animations_give_their_first_frame():
    frames = [Image.new("RGB", (20, 10), colour) for colour in ("red", "lime", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        data = _encode(
            frames[0], kind, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "WEBP" else {})
        )
        assert Image.open(io.BytesIO(data)).n_frames == 3
        assert np.asarray(decode_image(data))[5, 5].tolist() == [255, 0, 0]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation):
    turned = {
        1: _SMOOTH,
        2: _SMOOTH[:, ::-1],
        3: _SMOOTH[::-1, ::-1],
        4: _SMOOTH[::-1],
        5: _SMOOTH.swapaxes(0, 1),
        6: np.rot90(_SMOOTH, -1),
        7: np.rot90(_SMOOTH, -1)[:, ::-1][::-1, ::-1],
        8: np.rot90(_SMOOTH),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = np.asarray(decode_image(_encode(_SMOOTH, "PNG", exif=exif)))
    if orientation == 7:  # mirrored over the other diagonal
        turned[7] = _SMOOTH[::-1, ::-1].swapaxes(0, 1)
    np.testing.assert_array_equal(found, turned[orientation])


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize(
    "block", [b"garbage", b"MM\x00*\x00\x00\x00\x08\xff\xff\x01\x12garbage", b"MM\x00*\x7f\xff\xff\xff"]
)
def test_damaged_exif_is_ignored(block):
    data = _encode(_SMOOTH, "JPEG", exif=b"Exif\x00\x00" + block)
    np.testing.assert_array_equal(decode_image(data), decode_image(_encode(_SMOOTH, "JPEG")))


def test_a_damaged_jpeg_is_used_or_refused_but_never_a_crash():
    data = bytearray(_encode(_PIXELS, "JPEG"))
    used = 0
    for place in range(2, len(data), 7):
        changed = data.copy()
        changed[place] ^= 0xFF
        try:
            image = decode_image(bytes(changed), name="row 3")
        except ValueError as error:
            assert "row 3" in str(error)  # noqa: PT017 - either way is right
        else:
            used += image.mode == "RGB"
    assert used > 100  # most damage lies in the pixels, which the decoder bridges


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP"])
def test_a_file_that_ends_early_is_refused(kind):
    data = _encode(_PIXELS, kind)
    for end in (0, 3, 40, len(data) // 2):
        with pytest.raises(ValueError, match="page 7"):
            decode_image(data[:end], name="page 7")


def test_an_opened_file_that_ends_early_has_no_digest():
    """Pillow reads the pixels only when they are asked for: a query with such a picture is a failed one, and no crash."""
    data = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)).save(data, "PNG")
    opened = Image.open(io.BytesIO(data.getvalue()[: len(data.getvalue()) // 2]))
    with pytest.raises(ValueError, match=r"a picture of \(64, 64\) pixels can't be read: .*truncated"):
        image_digest(opened)


def test_what_is_no_picture_is_refused(tmp_path):
    (tmp_path / "page.html").write_text("<html>not found</html>")
    with pytest.raises(ValueError, match=r"page.html: not an image that Pillow can open .*b'<html>no'.*give JPEG"):
        decode_image(tmp_path / "page.html")
    with pytest.raises(ValueError, match=r"absent.png: can't be read \(No such file"):
        decode_image(tmp_path / "absent.png")
    with pytest.raises(
        ValueError, match=r"https://a.b/c.png: a URL, and nothing is fetched here; give the picture itself"
    ):
        decode_image("https://a.b/c.png")
    for array, message in [
        (np.zeros((0, 4, 3), np.uint8), r"shape \(0, 4, 3\)"),
        (np.zeros((3, 40, 40), np.uint8), r"shape \(3, 40, 40\)"),
        (np.full((2, 2), 2.0), "floats must lie from 0 to 1"),
        (np.full((2, 2), np.nan), "floats must lie from 0 to 1"),
        (np.zeros((2, 2), np.int64), "array of int64"),
    ]:
        with pytest.raises(ValueError, match=f"image: .*{message}"):
            decode_image(array)


def test_crop_inside_and_over_the_edge():
    image = Image.fromarray(_PIXELS)
    for bbox, (left, top, right, bottom) in {
        (3, 5, 10, 7): (3, 5, 10, 7),
        (2.5, 3.5, 2.75, 5.25): (2, 3, 3, 6),
        (-10, -2, 5, 4): (0, 0, 5, 4),
        (60, 40, 900, 900): (60, 40, 64, 48),
        (-1e9, -1e9, 1e9, 1e9): (0, 0, 64, 48),
    }.items():
        np.testing.assert_array_equal(np.asarray(crop(image, bbox)), _PIXELS[top:bottom, left:right])


@pytest.mark.parametrize(
    ("bbox", "message"),
    [
        ((64, 0, 70, 10), "outside the picture, whose coordinates end at 64 x 48"),
        ((0, -9, 9, 0), "outside the picture, whose coordinates end at 64 x 48"),
        ((9, 9, 3, 20), "has no area"),
        ((9, 9, 9, 20), "has no area"),
        ((0, 0, math.nan, 9), "finite"),
        ((0, 0, math.inf, 9), "finite"),
        ((1, 2, 3), "four numbers"),
        (("a", 0, 1, 1), "four numbers"),
        (None, "four numbers"),
    ],
)
def test_boxes_that_no_policy_saves_are_refused(bbox, message):
    with pytest.raises(ValueError, match=f"call 2: bbox .*{message}"):
        crop(Image.fromarray(_PIXELS), bbox, name="call 2")


def test_smart_resize_equals_that_of_transformers():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        height = int(2 ** rng.uniform(0, 13))
        width = max(-(-height // 200), int(height * 2 ** rng.uniform(-7.6, 7.6)))  # up to 1:200
        factor, low = int(rng.choice([8, 28])), int(2 ** rng.uniform(6, 12))
        bounds = (low, int(low * 2 ** rng.uniform(1, 12)))
        assert smart_resize(height, width, factor, *bounds) == their_resize(height, width, factor, *bounds)
    assert smart_resize(1, 1, 28, 3136, 12845056) == (56, 56)
    with pytest.raises(ValueError, match=r"wide\.png: 20000x10 pixels; one side may be at most 200 times the other"):
        smart_resize(10, 20_000, 28, 3136, 12845056, name="wide.png")


def _same_as_transformers(image: Image.Image, **options) -> None:
    theirs = Qwen2VLImageProcessorPil(**options)(image, return_tensors="np")
    found = ImageProcessor(**options)(image)
    assert found.grid == tuple(theirs["image_grid_thw"][0])
    np.testing.assert_array_equal(found.patches, theirs["pixel_values"])
    assert ImageProcessor(**options).tokens(image.height, image.width) == found.tokens == len(found.patches) // 4


@pytest.mark.parametrize("size", [(1, 1), (1, 150), (27, 29), (100, 300), (333, 211), (2, 399)])
def test_patches_of_made_pictures_equal_those_of_transformers(size):
    pixels = _RNG.integers(0, 256, (*size, 3), np.uint8)
    _same_as_transformers(Image.fromarray(pixels), min_pixels=3136, max_pixels=28 * 28 * 64)


@pytest.mark.parametrize(
    "name",
    [
        "vrag_demo_pages/pages/00a76e3a9a36255616e2dc14a6eb5dde598b321f_1.jpg",
        "fvqa50/images/001_fvqa_train_4724.jpg",
        "fvqa50/images/002_fvqa_train_2759.jpg",
    ],
)
def test_patches_of_real_pictures_equal_those_of_transformers(shared_data, name):
    image = decode_image(shared_data(name))
    _same_as_transformers(image, min_pixels=3136, max_pixels=28 * 28 * 256)
    _same_as_transformers(image, min_pixels=28 * 28 * 1600, max_pixels=28 * 28 * 2000)  # enlarged


def test_other_settings_equal_those_of_transformers():
    options = {"patch_size": 6, "merge_size": 3, "temporal_patch_size": 1}
    image = Image.fromarray(_PIXELS)
    theirs = Qwen2VLImageProcessorPil(
        **options, image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.3, 0.4], rescale_factor=1 / 127.5
    )
    ours = ImageProcessor(**options, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), rescale=1 / 127.5)
    np.testing.assert_array_equal(ours(image).patches, theirs(image, return_tensors="np")["pixel_values"])


def test_windows_hold_the_patches_that_transformers_puts_there():
    import torch

    processor = ImageProcessor(patch_size=4, min_pixels=64, max_pixels=10**5, window=32)
    for size in [(17, 9), (64, 32), (75, 43), (8, 150), (96, 96)]:
        picture = _RNG.integers(0, 256, (*size, 3), np.uint8)
        found = processor(picture)
        raster = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=10**5)(picture, return_tensors="np")
        grid = torch.as_tensor(raster["image_grid_thw"])
        index, edges = get_vision_window_index(grid, 2, 32, 4)
        places = get_vision_position_ids(grid, 2).numpy().reshape(-1, 4, 2)
        values = raster["pixel_values"].reshape(-1, 4, found.patches.shape[1])
        assert len(found.patches) == 64 * (len(edges) - 1)
        for number, (start, end) in enumerate(zip(edges // 4, edges[1:] // 4)):
            window = slice(64 * number, 64 * (number + 1))
            real = found.valid[window]
            np.testing.assert_array_equal(found.positions[window][real], places[index[start:end]].reshape(-1, 2))
            np.testing.assert_array_equal(found.patches[window][real], values[index[start:end]].reshape(real.sum(), -1))
            assert not found.patches[window][~real].any()
        # image tokens come in raster order
        np.testing.assert_array_equal(found.patches.reshape(-1, *values.shape[1:])[found.slots], values)
        assert found.tokens == len(values)


def test_several_pictures_share_an_array():
    processor = ImageProcessor(patch_size=4, min_pixels=64, max_pixels=10**5, window=32)
    first, second = processor(_PIXELS), processor(_PIXELS[:9, :17])
    assert [len(image.patches) for image in (first, second)] == [256, 64]
    together = concatenate([first, second])
    assert together.patches.shape == (320, 96)
    assert concatenate([second, second, first], 1024).patches.shape == (1024, 96)
    np.testing.assert_array_equal(together.segments, np.r_[first.valid * 1, second.valid * 2])
    groups = np.asarray(together.patches).reshape(80, -1)
    tokens = together.slots[together.slots >= 0]
    expected = [image.patches.reshape(-1, 4 * 96)[image.slots] for image in (first, second)]
    np.testing.assert_array_equal(groups[tokens], np.concatenate(expected))
    assert (np.diff(np.flatnonzero(np.asarray(together.slots) < 0)) == 1).all()  # all of the padding comes last
    empty = blank(64, 96)
    assert not empty.segments.any()
    assert (empty.slots == -1).all()
    for images, patches, message in [
        ([], 64, "no image"),
        ([first], 128, "take 256 patches, and the array has 128"),
        ([first], 96, "96 patches is no multiple of 64"),
        ([first, ImageProcessor(patch_size=4)(_PIXELS)], 1024, "different processors"),
    ]:
        with pytest.raises(ValueError, match=message):
            concatenate(images, patches)
    with pytest.raises(ValueError, match="do not fill the grid"):
        arrange(first.patches, (1, 4, 4), merge=2, window=None, digest="")
    with pytest.raises(ValueError, match="multiples of 2"):
        arrange(first.patches, (1, 3, 4), merge=2, window=None, digest="")


def test_a_process_makes_the_pictures_of_its_devices(monkeypatch):
    """Two micro-batches on four shards of two devices each: as `concatenate` has them, made shard by shard and once."""
    processor = ImageProcessor(patch_size=4, min_pixels=64, max_pixels=10**5, window=32)
    first, second = processor(_PIXELS), processor(_PIXELS[:9, :17])
    vision = VisionConfig(model_type="qwen2_5_vl", depth=1, embed=16, heads=2, mlp=16, out=16, patch=4, window=32)
    groups = {(0, 1): [first, second], (1, 3): [second]}
    sharding = NamedSharding(make_mesh({"data": 4, "tensor": 2}), PartitionSpec(None, "data"))
    blocks, make = [], jax.make_array_from_callback

    def recorded(shape, sharding, block):
        def made(index):
            blocks.append(block(index))
            return blocks[-1]

        return make(shape, sharding, made)

    monkeypatch.setattr(jax, "make_array_from_callback", recorded)
    placed = place_images(groups, (2, 4), 384, vision, jnp.bfloat16, sharding)
    assert {block.shape[:2] for block in blocks} == {(2, 1)}
    assert len(blocks) == 4 * 8
    assert len({id(block) for block in blocks}) == 4 * 4
    for place in np.ndindex(2, 4):
        expected = concatenate(groups[place], 384) if place in groups else blank(384, 96)
        for name in ("patches", "positions", "segments", "slots"):
            found, wanted = np.asarray(getattr(placed, name))[place], np.asarray(getattr(expected, name))
            np.testing.assert_array_equal(found, wanted.astype(jnp.bfloat16) if name == "patches" else wanted)


def test_digests_tell_pictures_and_processing_apart():
    processor = ImageProcessor(max_pixels=28 * 28 * 16)
    changed = _PIXELS.copy()
    changed[7, 9, 1] ^= 64
    digests = {processor(picture).digest for picture in (_PIXELS, changed, _PIXELS[::-1], _PIXELS[:, ::-1])}
    digests.add(ImageProcessor(max_pixels=28 * 28 * 16, window=112)(_PIXELS).digest)
    assert len(digests) == 5
    assert processor(_encode(_PIXELS, "PNG")).digest == processor(_PIXELS).digest


def test_pictures_beyond_use_are_named():
    processor = ImageProcessor()
    assert processor(np.zeros((1, 1, 3), np.uint8)).tokens == 4
    with pytest.raises(ValueError, match=r"image 2 of row 5: 20000x10 pixels"):
        processor(np.zeros((10, 20_000, 3), np.uint8), name="image 2 of row 5")


@pytest.mark.parametrize(
    "sizes",
    [
        {"min_pixels": 3136, "max_pixels": 401408},
        {"size": {"shortest_edge": 3136, "longest_edge": 401408}},
        {"size": {"min_pixels": 3136, "max_pixels": 401408}},
        {"min_pixels": 3136, "max_pixels": 401408, "size": {"shortest_edge": 1, "longest_edge": 2}},
    ],
)
def test_every_spelling_of_the_bounds_is_read(sizes):
    found = processor_from_hf(sizes)
    assert (found.min_pixels, found.max_pixels) == (3136, 401408)
    assert processor_from_hf({"image_processor": sizes, "processor_class": "Qwen2_5_VLProcessor"}) == found


def test_the_round_trip_through_transformers(tmp_path):
    ours = ImageProcessor(patch_size=16, merge_size=3, min_pixels=5000, max_pixels=90_000, std=(0.5, 0.25, 0.125))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(ours.to_hf()))
    theirs = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    picture = Image.fromarray(_PIXELS)
    np.testing.assert_array_equal(ours(picture).patches, theirs(picture, return_tensors="np")["pixel_values"])
    theirs.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "preprocessor_config.json").read_text())
    assert processor_from_hf(saved) == ours
    assert processor_from_hf(saved, window=112).window == 112
    assert processor_from_hf({}) == ImageProcessor()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_resize": False}, "do_resize=False"),
        ({"resample": 2}, "resample=2"),
        ({"image_processor_type": "CLIPImageProcessor"}, "'CLIPImageProcessor'"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"min_pixels": 10, "max_pixels": 5}, "max_pixels=5"),
    ],
)
def test_other_processing_is_refused(change, message):
    with pytest.raises(ValueError, match=f"some/file.json: .*{message}"):
        processor_from_hf(change, "some/file.json")
    assert issubclass(UnsupportedModelError, ValueError)
