"""What all launch programs share."""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any, NoReturn

import pytest

from launch.command import check_writable, join_installed_configs, with_installed_configs
from routerl_jax.core.buckets import read_object, write_object
from routerl_jax.core.progress import Bar, be_quiet, note
from routerl_jax.training import rl
from tests.buckets import bucket  # noqa: F401 (a fixture)
from tests.programs import launch_here, refusal, write_config
from tests.training.small_run import make_sft_config

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["evaluate", "--workdir=az://bucket/run"], "--workdir=az://bucket/run"),
        (["export_hf", "--workdir=runs/x", "--output=https://host/export"], "--output=https://host/export"),
        (
            [
                "train",
                "--config=configs/quickstart.py",
                "--workdir=runs/x",
                "--config.knowledge.text.directory=az://b/kb",
            ],
            "--config.knowledge.text.directory=az://b/kb",
        ),
    ],
)
def test_other_urls_than_those_of_buckets_are_refused(arguments: list[str], key: str) -> None:
    """They would become local directories called `az:`."""
    assert refusal(*arguments) == (
        f"launch.{arguments[0]}: {key}: this must be a path in a file system, or in a bucket (gs://, s3://)"
    )
    assert not list(ROOT.glob("[ah]*:"))


def test_a_warning_is_told_as_an_error_is(tmp_path: pathlib.Path) -> None:
    """Without the time, the process and the line of the code, which only --verbosity asks for; libraries' own loggers, too."""
    (tmp_path / "warns.py").write_text(
        "import logging\nfrom launch.command import start\n"
        "def main(argv):\n    logging.getLogger('a.library').warning('careful')\n"
        "start(main, lambda: None)\n"
    )
    command = [sys.executable, str(tmp_path / "warns.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = [
        subprocess.run([*command, *more], env=env, capture_output=True, text=True, check=True).stderr
        for more in ([], ["--verbosity=1"])
    ]
    assert told[0] == "launch.warns: careful\n"
    assert "warns.py:4] careful" in told[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it defines no get_config()"),
        ("def get_config()\n    pass", "SyntaxError: expected ':' (FILE, line 1)"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' (FILE, line 1)"),
        ("import os\ndef get_config():\n    return os.nothing", "has no attribute 'nothing' (FILE, line 3)"),
        ("def get_config():\n    return TRAIN(stepz=3)", "unexpected keyword argument 'stepz' (FILE, line 2)"),
        ("def get_config():\n    return TRAIN(steps=-3)", "steps=-3 must not be negative"),
        ("def get_config():\n    pass", "its get_config() returns nothing"),
    ],
)
def test_what_is_wrong_in_a_configuration_file_is_told_in_one_line(
    text: str, message: str, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text.replace("TRAIN", '__import__("routerl_jax.training.config").training.config.TrainConfig'))
    for more in ((), ("--config.steps=3",)):
        refused = refusal("train", f"--config={file}", f"--workdir={tmp_path / 'run'}", *more)
        assert refused.startswith(f"launch.train: --config={file}: ")
        refused = refused.replace("'stepz'. Did you mean 'steps'?", "'stepz'")  # Python 3.13 has a hint
        assert message.replace("FILE", str(file)) in refused


def test_an_error_in_a_file_of_one_s_own_is_told_with_its_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message alone may say nothing about where it arose."""
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "odd_recipe.py"
    file.write_text("def recipe(agent, stages, tools, normalizer):\n    return int('x')\n")
    config = write_config(make_sft_config(recipe="odd_recipe:recipe"), tmp_path / "config.py")
    refused = refusal("train", f"--config={config}", f"--workdir={tmp_path / 'run'}")
    assert refused == f"launch.train: invalid literal for int() with base 10: 'x' ({file}, line 2)"


def test_what_is_not_given_is_told_in_one_line() -> None:
    assert refusal("build_kb") == "launch.build_kb: give --workdir; give --config (--help lists the options)"
    assert refusal("train").startswith(
        "launch.train: give --config; give --workdir, the directory of the run; or --show"
    )
    assert "quickstart.py:foo: it has no variants; leave out :foo" in refusal(
        "train", "--config=configs/quickstart.py:foo"
    )
    empty = refusal("train", "--config=configs/quickstart.py", "--workdir=")  # else the run would be in this directory
    assert empty == "launch.train: --workdir= is empty: give a path"


def test_files_of_other_rows_are_no_episodes(tmp_path: pathlib.Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    refused = refusal("view", f"--file={tmp_path / 'metrics.jsonl'}")
    assert refused.startswith(
        f"launch.view: {tmp_path / 'metrics.jsonl'} holds no records of episodes: a line has no 'id'"
    )


def test_the_viewers_page_says_what_to_install(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setitem(sys.modules, "routerl_jax.extras.viewer.app", None)  # as without its packages
    assert "the page needs packages that can't be imported" in refusal("view", f"--workdir={tmp_path}")


def test_a_program_works_on_a_copy_of_a_bucket_and_names_the_bucket(
    bucket: str,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """--output is written there, and what is wrong with --workdir is said of the place."""
    assert f"launch.evaluate: {bucket}/run holds no run (config.json is missing)" in refusal(
        "evaluate", f"--workdir={bucket}/run"
    )
    row = {"_id": "1", "question": "Capital of Ghana?", "answer": "Accra", "type": "bridge", "level": "easy"}
    row |= {"context": [["Ghana", ["Its capital is Accra."]]], "supporting_facts": [["Ghana", 0]]}
    write_object(f"{bucket}/hotpot.json", json.dumps([row]).encode())
    assert not launch_here("make_corpus", f"--questions={bucket}/hotpot.json", f"--output={bucket}/corpus.jsonl")
    assert capsys.readouterr().out.startswith(f"{bucket}/corpus.jsonl: 1 distinct passage of 1 ")
    assert json.loads(read_object(f"{bucket}/corpus.jsonl") or b"")["text"] == "Its capital is Accra."


def test_dtypes_of_an_export_are_checked_first() -> None:
    command = [sys.executable, "-m", "launch.export_hf", "--workdir=/nowhere", "--output=/nowhere", "--dtype=int8"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100, check=False)
    assert done.returncode == 1
    assert "flag --dtype=int8: value should be one of <float32|bfloat16|float16>" in done.stderr


def test_places_that_cannot_be_written_are_refused_first(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """Files stand in for a lack of rights, which root does not know; a disk's own refusal is told as it is."""
    (tmp_path / "file").touch()
    config = write_config(make_sft_config(), tmp_path / "config.py")
    monkeypatch.setattr("routerl_jax.training.sft.train_sft", lambda *_, **__: pytest.fail("it has begun to train"))
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        message = refusal("train", f"--config={config}", f"--workdir={place}")
        assert message == f"launch.train: --workdir={place}: {tmp_path / 'file'} is a file; give a directory"
    for program, flags in {
        "build_kb": ["--config=configs/build_kb.py", "--config.corpus=nowhere.jsonl"],
        "construct_data": [
            "--config=configs/r1_router_data.py",
            "--config.data=nowhere.jsonl",
            "--config.teacher=annotations",
        ],
        "select_data": [f"--config={config}"],
    }.items():
        message = refusal(program, *flags, f"--workdir={tmp_path / 'file' / 'x'}")
        assert message.endswith(f"{tmp_path / 'file'} is a file; give a directory")
    for place in (tmp_path / "new", tmp_path / "a" / "new", tmp_path):
        check_writable("--output", place)
    check_writable("--output", tmp_path / "file", file=True)
    with pytest.raises(ValueError, match="is a directory; give a file"):
        check_writable("--output", tmp_path, file=True)
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"config.py", "file"}

    def full(dir: pathlib.Path) -> NoReturn:
        raise OSError(28, os.strerror(28), str(dir / "tmp"))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(
        ValueError, match=rf"^--output=new: nothing can be written in {pathlib.Path.cwd()} \(No space left"
    ):
        check_writable("--output", "new")


def test_errors_of_the_system_are_one_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those in the middle of a run, such as a disk that is full by then."""
    config = write_config(make_sft_config(), tmp_path / "config.py")
    for error, told in (
        (OSError(28, os.strerror(28), "/disk/metrics.tmp"), "/disk/metrics.tmp: No space left on device (ROUTERL_"),
        (ConnectionResetError("the server went away"), "the server went away"),
        (TimeoutError(), "TimeoutError"),
    ):

        def broken(*_: Any, failure: OSError = error, **__: Any) -> NoReturn:
            raise failure

        monkeypatch.setattr("routerl_jax.training.sft.train_sft", broken)
        message = refusal("train", f"--config={config}", f"--workdir={tmp_path / 'run'}")
        assert message.startswith(f"launch.train: {told}")
    monkeypatch.setenv("ROUTERL_TRACEBACK", "1")
    with pytest.raises(TimeoutError):
        launch_here("train", f"--config={config}", f"--workdir={tmp_path / 'run'}")


def test_quiet_programs_show_no_progress(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(*_: Any, **__: Any) -> None:
        for _ in Bar(range(2), desc="training"):
            note("how it goes")
        print("results")

    monkeypatch.setattr("routerl_jax.training.sft.train_sft", train)
    config = write_config(make_sft_config(), tmp_path / "config.py")
    for given, err, out in (
        ([], ["training: 0/2", "training: 2/2"], ["how it goes", "how it goes", "results"]),
        (["--quiet"], [], ["results"]),
    ):
        assert launch_here("train", f"--config={config}", f"--workdir={tmp_path / 'run'}", *given) is None
        captured = capsys.readouterr()
        assert [line.split(" [")[0] for line in captured.err.splitlines()] == err
        assert captured.out.splitlines() == out
    be_quiet(False)


def test_an_interrupted_run_says_how_to_go_on(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the checkpoint that was written last, which may be its warm start's."""

    def interrupted(*_: Any, **__: Any) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(rl, "train_rl", interrupted)
    workdir = tmp_path / "a run"
    arguments = ["--config=configs/quickstart.py", f"--workdir={workdir}", "--config.steps=7"]
    given = f"{arguments[0]} '--workdir={workdir}' {arguments[2]}"
    command = f"Go on with: python -m launch.train {given} --resume=auto\n"
    assert launch_here("train", *arguments) == 130
    assert capsys.readouterr().err == f"launch.train: interrupted before the first checkpoint. {command}"
    for time, place in enumerate(
        ("warm_start/checkpoints/40", "checkpoints/9", "checkpoints/12.orbax-tmp", "checkpoints/10")
    ):
        (workdir / place).mkdir(parents=True)
        os.utime(workdir / place, (time, time))
    assert launch_here("train", *arguments, "--resume=auto") == 130
    newest = workdir / "checkpoints" / "10"
    assert capsys.readouterr().err == f"launch.train: interrupted; the newest checkpoint is {newest}. {command}"


def test_the_home_directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells leave the ~ of --workdir=~/run as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{")
    assert str(tmp_path / "run" / "config.json") in refusal("export_hf", "--workdir=~/run", "--output=~/policy")
    assert not (tmp_path / "~").exists()


def test_a_variant_that_a_configuration_does_not_have_is_one_line() -> None:
    message = refusal("build_kb", "--config=configs/build_kb.py:foo", "--workdir=kb")
    assert message.startswith(
        "launch.build_kb: --config=configs/build_kb.py:foo: unknown kind of knowledge base to build 'foo'. Known: bm25, "
    )
    message = refusal("train", "--config=configs/r1_searcher_qwen25_7b.py:grop", "--workdir=run")
    assert "variant 'grop' of the configuration: expected one of paper, released, grpo, em, cover_em, " in message
    message = refusal("train", "--config=configs/search_qwen25_vl_7b.py:x", "--workdir=run")
    assert message.startswith(
        "launch.train: --config=configs/search_qwen25_vl_7b.py:x: it has no variants; leave out :x"
    )


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--config.steps=many", "flag --config.steps=many: 'many' is no whole number (--help"),
        ("--config.rollout.temperature=hot", "flag --config.rollout.temperature=hot: 'hot' is no number (--help"),
        ("--config.evaluation.baselines=maybe", "flag --config.evaluation.baselines=maybe: "),
        ("--steps=3", "Unknown command line flag 'steps'"),
        ("--config.data.nosuch=3", "unknown config key config.data.nosuch; known keys: epochs, "),
    ],
)
def test_a_flag_that_cannot_be_used_is_named(flag: str, said: str) -> None:
    message = refusal("train", "--config=configs/quickstart.py", "--workdir=run", flag)
    assert message.startswith(f"launch.train: {said}")
    assert "defined twice" not in message


def test_configurations_beside_the_programs_are_found(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any directory; but what lies below the directory comes first, and other paths stay as they are."""
    monkeypatch.chdir(tmp_path)
    whole = f"{ROOT}/configs/quickstart.py"
    given = ["train", "--config=configs/quickstart.py", "--config", "configs/quickstart.py", "configs/quickstart.py"]
    assert with_installed_configs(given) == ["train", f"--config={whole}", "--config", whole, "configs/quickstart.py"]
    variant = ["x", "-config=configs/smollm2_search.py:r1_searcher", "--config.steps=2"]
    assert with_installed_configs(variant)[1] == f"-config={ROOT}/configs/smollm2_search.py:r1_searcher"
    for other in ("--config=configs/none.py", "--config=mine.py", "--config.steps=configs/quickstart.py"):
        assert with_installed_configs(["x", other]) == ["x", other]
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.py").touch()
    assert with_installed_configs(given) == given


def test_a_directory_configs_of_one_s_own_hides_no_other_configuration(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files come first; what they import of the packaged ones is found, too."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "configs"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "__init__.py").touch()  # else the checkout's package would come first
    (tmp_path / "configs" / "mine.py").write_text("from configs.common import ATLAS_POLICY\n")
    (tmp_path / "configs" / "quickstart.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    join_installed_configs()
    try:
        assert importlib.import_module("configs.mine").ATLAS_POLICY["vocab_size"] == 1024
        assert not hasattr(importlib.import_module("configs.quickstart"), "get_config")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "configs"]:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        (["stages.main.reward.routerag.efficiency=0.5"], "'routerag.efficiency': 0.5"),
        (["stages.main.reward.my_rewards:brevity=-1"], "'my_rewards:brevity': -1"),
        (["stages.main.reward.my.rewards:brevity", "0.25"], "'my.rewards:brevity': 0.25"),
        (["stages.main.reward.f1=1", "stages.main.reward.em=0"], "'f1': 1"),
        (["watch.most.rollout/no_signal=0.5"], "'rollout/no_signal': 0.5"),
        (["evaluation.names.trained=ours"], "config.evaluation.names = {'trained': 'ours'}"),
        (["agent.settings.looks=False"], "config.agent.settings = {'looks': False}"),
        (["knowledge.notes.source=12"], "config.knowledge.notes.source = '12'"),
        (["knowledge.text.settings.fields.title=name"], "{'fields': {'title': 'name'}}"),
        (["stages.late.start=5", "stages.late.reward.my:term=1"], "config.stages.late.reward = {'my:term': 1"),
        (["stages.late.start=5", "stages.late.learner.loss.kl_coef=0.0"], "{'loss': {'kl_coef': 0.0}}"),
    ],
)
def test_an_entry_of_a_mapping_is_set_by_its_name(
    overrides: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new one, and one with dots or colons; the others stay."""
    flags = [word if word[0].isdigit() else f"--config.{word}" for word in overrides]
    assert launch_here("train", "--config=configs/quickstart.py", "--show", *flags) is None
    captured = capsys.readouterr()
    assert shown in captured.out
    assert "config.knowledge.text.source = 'atlas/text'" in captured.out
    assert "'format': 0.1" in captured.out
    for name in ("knowledge.notes", "stages.late"):
        assert (f"config.{name} is new, beside: " in captured.err) == any(word.startswith(name) for word in overrides)


def test_a_misspelt_field_of_an_entry_is_named() -> None:
    for override, said in (
        ("knowledge.notes.sorce=x", "unknown config key config.knowledge.notes.sorce; did you mean"),
        ("knowledge.text.sorce=x", "unknown config key config.knowledge.text.sorce; did you mean"),
        ("stages.main.reward.my:term=much", "config.stages.main.reward.my:term"),
    ):
        message = refusal("train", "--config=configs/quickstart.py", "--show", f"--config.{override}")
        assert said in message
        assert "\n" not in message
