"""Shows an episode record: in colour for a terminal (`render`), and all pictures that the policy looked at as one (`sheet`)."""

from __future__ import annotations

import hashlib
import io
import math
import pathlib
import textwrap
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from routerl_jax.core.files import write_atomic
from routerl_jax.core.text import counted
from routerl_jax.evaluation.records import picture_path
from routerl_jax.models.images import decode_image

_PAGE = (640, 640)  # pixels that a page may take on the sheet
_CROP = (360, 240)
_ZOOM = 6  # largest enlargement of a crop
_GAP, _LINE, _FONT = 12, 22, 16
_COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf")
_WORDS = 110  # letters in a line


def render(record: dict[str, Any], sheet: str | pathlib.Path | None = None) -> RenderableType:
    """An episode record (evaluation.records) as thoughts, searches, passages and answer.

    Args:
      sheet: path of the sheet with its pictures and boxes (`write_sheet`).
    """
    numbers = {id(item): number for number, item in enumerate(pictures_shown(record), 1)}
    branches = {branch["turn"]: branch for branch in record.get("branches", ())}
    parts: list[RenderableType] = [Text.assemble(("Question  ", "bold"), record["question"])]
    last = len(record["turns"]) - 1
    for index, turn in enumerate(record["turns"]):
        parts += turn_parts(turn, last=index == last, branch=branches.get(index), numbers=numbers)
    return Group(*parts, *ending_parts(record, sheet))


def turn_parts(
    turn: Mapping[str, Any],
    *,
    last: bool = False,
    branch: Mapping[str, Any] | None = None,
    numbers: Mapping[int, int] = types.MappingProxyType({}),
) -> list[RenderableType]:
    """The texts of a turn of a record, and their consequences.

    Args:
      last: an answer in it is the episode's, which `ending_parts` shows.
      branch: the fork in it.
      numbers: of the pictures on the sheet, by the `id` of their dict.
    """
    parts: list[RenderableType] = []
    # the action is optional for agents
    action: dict[str, Any] = turn["action"] or {"kind": "written", "thought": ""}
    if action["kind"] == "written":
        text = turn["text"].strip() or "(nothing)"
        parts.append(Text.assemble(("writes    ", "cyan"), (turn["forced"], "dim"), text))
    if action["thought"]:
        parts.append(Text.assemble(("thinks    ", "dim"), (action["thought"], "italic cyan")))
    if action["kind"] == "search" and action["query"]:
        parts.append(searching(action["tool"], action["query"]))
    if branch:
        odds = f"a fork: {branch['tool']} was chosen for the policy, which gives it {math.exp(branch['logprob']):.2f}"
        parts.append(Text.assemble(("  branch  ", "bold magenta"), (odds, "magenta")))
    if action["kind"] == "invalid":
        parts.append(Text.assemble(("invalid   ", "bold red"), action["error"], ("  " + turn["text"].strip(), "dim")))
    elif action["kind"] == "answer" and not last:  # the answer to a sub-question
        parts.append(Text.assemble(("finds     ", "yellow"), action["answer"]))
    elif action["kind"] == "region":
        parts.append(Text.assemble(("looks at  ", "bold yellow"), _box(action["box"])))
    elif action["kind"] == "refusal":
        parts.append(Text.assemble(("refuses   ", "bold yellow"), turn["text"].strip()))
    if action["kind"] != "invalid" and action.get("error"):
        parts.append(Text.assemble(("  though  ", "bold red"), action["error"]))
    pictured = {item["passage"] for item in turn.get("shown", ())}
    for call in turn["calls"]:
        if call.get("facts"):
            parts.append(Text.assemble(("  from    ", "dim"), ("; ".join(call["facts"]), "dim")))
        if call.get("nodes"):
            parts.append(Text.assemble(("  through ", "dim"), ("; ".join(call["nodes"]), "dim")))
        parts.append(findings(call, pictured))
    parts += [
        _shown_picture(item, numbers.get(id(item))) for item in turn.get("shown", ()) if item["digest"] or item["error"]
    ]
    if info := turn.get("info"):
        measured = "   ".join(
            f"{name} {value if isinstance(value, str) else f'{value:.4g}'}" for name, value in info.items()
        )
        parts.append(Text.assemble(("  measures ", "dim"), (measured, "dim")))
    if turn.get("rewards"):
        parts.append(Text.assemble(("  earns   ", "dim"), (_terms(turn["rewards"]), "dim")))
    return parts


def searching(tool: str, query: str) -> Text:
    """A search: of which knowledge base, for what."""
    return Text.assemble(("searches  ", "bold yellow"), (f"[{tool}] ", "yellow"), query)


def ending_parts(record: Mapping[str, Any], sheet: str | pathlib.Path | None = None) -> list[RenderableType]:
    """The answer of a record, with its judgement. `sheet` as in `render`."""
    parts: list[RenderableType] = []
    answer = record["prediction"]
    golds = record.get("golden_answers") or []
    correct = " / ".join(golds)
    parts.append(Text.assemble(("answers   ", "bold green"), (answer if answer is not None else "(no answer)", "bold")))
    if failure := record.get("failure"):
        parts.append(Text.assemble(("no reply  ", "bold red"), failure["kind"], (f"  {failure['message']}", "dim")))
    if correct:
        parts.append(Text.assemble(("gold      ", "dim"), (correct, "dim")))
    if verdict := record.get("verdict"):
        reason = " ".join(verdict["said"].split())
        parts.append(Text.assemble(("judge     ", "dim"), verdict["kind"], (f"  {reason}" if reason else "", "dim")))
    if usage := record.get("usage"):
        money = f", {usage['cost']:.5f} of money" if usage["cost"] else ""
        again = f", {usage['retries']} sent again" if usage.get("retries") else ""
        usage_text = (
            f"{usage['replies']} repl{'y' if usage['replies'] == 1 else 'ies'}, "
            f"{counted(usage['prompt_tokens'], 'token')} read, {usage['tokens']:,} written{again}{money}"
        )
        parts.append(Text.assemble(("took      ", "dim"), (usage_text, "dim")))
    if record.get("rewards"):
        parts.append(Text.assemble(("rewards   ", "dim"), (_terms(record["rewards"]), "dim")))
    if sheet is not None:
        parts.append(Text.assemble(("drawn     ", "dim"), (str(sheet), "magenta")))
    return parts


def _terms(rewards: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:+.2f}" for name, value in rewards.items())


def _shown_picture(shown: dict[str, Any], number: int | None) -> RenderableType:
    """A picture that the policy was shown, with its number on the sheet, or why it could not be shown."""
    source = f" of {shown['passage']}" if shown["passage"] else ""
    if shown["error"]:
        return Text.assemble(("  unseen  ", "bold red"), f"a picture{source}: {shown['error']}")
    cut = f", the part {_box(shown['box'])} of it" if shown["box"] else ""
    on_sheet = "" if number is None else f"  [{number}]"
    return Text.assemble(("  sees    ", "magenta"), f"{shown['image'] or 'a picture'}{source}{cut}{on_sheet}")


def _box(box: Sequence[float]) -> str:
    return "(" + ", ".join(f"{side:g}" for side in box) + ")"


def findings(call: Mapping[str, Any], pictured: Collection[str] = ()) -> RenderableType:
    """The passages of a call, in a frame, or the reason of its failure.

    Args:
      pictured: ids of the passages whose pictures were shown. If the call has some of them, its others are only counted.
    """
    if call["error"] is not None:
        return Text.assemble(("  failed  ", "bold red"), call["error"])
    lines, passages = Text(), call["passages"]
    listed = [passage for passage in passages if passage["id"] in pictured] or passages
    for i, passage in enumerate(listed):
        lines.append(f"{passage['score']:.2f} ", "dim")
        if passage["title"] and passage["title"] not in passage["text"]:
            lines.append(f"{passage['title']}: ", "bold")
        if image := passage.get("image"):
            lines.append(f"(picture {passage['id'] if image.startswith('data:') else image}) ", "magenta")
        lines.append(passage["text"].strip() + ("\n" if i + 1 < len(listed) else ""))
    if len(listed) < len(passages):
        lines.append(f"\n{len(passages) - len(listed)} more found, not shown to the policy", "dim")
    return Panel(lines or Text("nothing found", "dim"), title=call["tool"], title_align="left", border_style="blue")


def pictures_shown(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The pictures that the policy of an episode record saw after its prompt: pages and crops in order, numbered from 1."""
    return [item for turn in record["turns"] for item in turn.get("shown", ()) if item["digest"] and item["image"]]


def write_sheet(record: Mapping[str, Any], directory: pathlib.Path, sheets: pathlib.Path) -> pathlib.Path | None:
    """Draws the sheet of an episode record as a PNG named by its content. Returns its path, or None if no picture was shown.

    Args:
      directory: the directory of the record, with its pictures (records.PictureFiles).
      sheets: the directory to write to.
    """
    if not pictures_shown(record):
        return None
    buffer = io.BytesIO()
    sheet(record, directory).save(buffer, "PNG", optimize=True)
    content = buffer.getvalue()
    path = sheets / f"{hashlib.sha256(content).hexdigest()[:24]}.png"
    if not path.is_file():
        write_atomic(path, content, shared=True)
    return path


def sheet(record: Mapping[str, Any], directory: pathlib.Path) -> Image.Image:
    """The sheet of a record: the question, a row per page with its numbered boxes and their crops, and the answer.

    A box is drawn on the raw page, however many crops lie between (agents.observation). A picture that can't be read any more
    is replaced by a message.
    """
    rows = [_row(look, directory) for look in looks(record)]
    answer = record["prediction"] if record["prediction"] is not None else "(no answer)"
    parts = [_text(record["question"]), *rows, _text(f"Answer: {answer}")]
    size = (max(part.width for part in parts) + 2 * _GAP, sum(part.height + _GAP for part in parts) + _GAP)
    canvas = Image.new("RGB", size, "white")
    top = _GAP
    for part in parts:
        canvas.paste(part, (_GAP, top))
        top += part.height + _GAP
    return canvas


def looks(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The pictures of an episode record and what was cut from each: `number` as on the sheet, or "question", `image` (its
    name), and `crops` of `number`, `box` (left, top, right, bottom in pixels of the raw picture) and `image`."""
    asked: list[dict[str, Any]] = [
        {"number": "question", "image": image, "crops": []} for image in record["images"] if image
    ]
    pages: dict[str, dict[str, Any]] = {}
    for number, item in enumerate(pictures_shown(record), 1):
        crop = {"number": number, "box": tuple(item["box"]), "image": item["image"]}
        if not item["box"]:
            pages.setdefault(item["digest"], {"number": str(number), "image": item["image"], "crops": []})
        elif item["parent"] in pages:
            pages[item["parent"]]["crops"].append(crop)
        elif len(asked) == 1:  # a closer look at the question's picture
            asked[0]["crops"].append(crop)
        else:
            pages[f"{number}"] = {"number": str(number), "image": item["image"], "crops": []}
    return [*asked, *pages.values()]


def _picture(directory: pathlib.Path, image: str) -> Image.Image | str:
    try:
        return decode_image(picture_path(directory, image))
    except ValueError as error:
        return f"a picture that can't be drawn: {error}"


def _row(look: Mapping[str, Any], directory: pathlib.Path) -> Image.Image:
    """A page with its boxes, and beside it their crops (`looks`)."""
    picture = _picture(directory, look["image"])
    if isinstance(picture, str):
        canvas = _text(picture)
    else:
        scale = min(1.0, *(most / side for most, side in zip(_PAGE, picture.size)))
        canvas = _sized(picture, scale)
        draw = ImageDraw.Draw(canvas)
        _label(draw, (0, 0), look["number"], "black")
        for crop in look["crops"]:
            colour = _colour(crop["number"])
            corners = [side * scale for side in crop["box"]]
            draw.rectangle(corners, outline=colour, width=3)
            _label(draw, (corners[0], max(corners[1] - _LINE, 0)), str(crop["number"]), colour)
    crops = [_crop(crop["number"], _picture(directory, crop["image"])) for crop in look["crops"]]
    if not crops:
        return canvas
    right = max(crop.width for crop in crops)
    high = max(canvas.height, sum(crop.height + _GAP for crop in crops) - _GAP)
    row = Image.new("RGB", (canvas.width + _GAP + right, high), "white")
    row.paste(canvas, (0, 0))
    top = 0
    for crop in crops:
        row.paste(crop, (canvas.width + _GAP, top))
        top += crop.height + _GAP
    return row


def _crop(number: int, crop: Image.Image | str) -> Image.Image:
    if isinstance(crop, str):
        return _text(f"{number}: {crop}", _WORDS // 2)
    inner = _sized(crop, min(_ZOOM, *(most / side for most, side in zip(_CROP, crop.size))))
    framed = Image.new("RGB", (inner.width + 6, inner.height + 6), _colour(number))
    framed.paste(inner, (3, 3))
    _label(ImageDraw.Draw(framed), (0, 0), str(number), _colour(number))
    return framed


def _sized(picture: Image.Image, scale: float) -> Image.Image:
    width, height = (max(1, round(side * scale)) for side in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS)


def _colour(number: int) -> str:
    return _COLOURS[(number - 2) % len(_COLOURS)]  # the first crop is the second picture


def _label(draw: ImageDraw.ImageDraw, position: tuple[float, float], text: str, colour: str) -> None:
    font = ImageFont.load_default(_FONT)
    left, top = position
    draw.rectangle((left, top, left + draw.textlength(text, font) + 6, top + _LINE), fill=colour)
    draw.text((left + 3, top + 1), text, fill="white", font=font)


def _text(text: str, letters: int = _WORDS) -> Image.Image:
    lines = textwrap.wrap(" ".join(text.split()), letters) or [""]
    font = ImageFont.load_default(_FONT)
    width = max(round(font.getlength(line)) for line in lines)
    image = Image.new("RGB", (max(width, 1) + 2, _LINE * len(lines)), "white")
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        draw.text((0, number * _LINE), line, fill="black", font=font)
    return image
