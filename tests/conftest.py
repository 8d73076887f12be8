"""Eight virtual CPU devices for every test, and the one place that says where the optional real data lies."""

import atexit
import functools
import gc
import importlib.metadata
import os
import pathlib
import resource
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# XLA's compilations of small programs are most of the tests' time: without LLVM's optimisations and with the older of its
# two code generators they take half of it. An empty XLA_FLAGS compiles as for users.
# Newer versions of XLA have one code generator, and a flag that XLA does not know ends the process.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_use_fusion_emitters=false" * importlib.metadata.version("jaxlib").startswith("0.10."),
)
# Threads of torch and NumPy's BLAS wait by spinning, and there are several workers already.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # xdist's workers have 80; tables are as wide as in a log
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Workers, and the programs that tests start and start again, compile once: the smallest programs too, of which a
    # process has hundreds.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="routerl-tests-")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import pytest

# Tracing makes millions of objects that live on; by default, Python looks for cycles in them every few milliseconds.
gc.set_threshold(200_000, 20, 100)
_MEMORY = 3 * 2**30  # bytes of a worker beyond which it frees programs

# Real datasets, where the machine has them; everything that needs them skips visibly elsewhere.
DATA = pathlib.Path(os.environ.get("ROUTERL_TEST_DATA", pathlib.Path(__file__).parents[2] / "shared" / "data"))


# Directories whose files take seconds. They come last, so that no worker is left with a long file when the others are done.
QUICK = {"agents", "core", "evaluation", "rewards", "services"}


def pytest_collection_modifyitems(items):
    """Long files first, and before them what looks at `small_run`, so that no worker waits for another at the end."""

    def turn(item) -> int:
        if _group(item.nodeid) == "small_run":
            return 0
        return 2 if QUICK & set(item.path.relative_to(pathlib.Path(__file__).parent).parts) else 1

    items.sort(key=turn)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Workers get whole files, and one of them every file that looks at `small_run`, which takes a minute to make.

    Groups by marks (--dist=loadgroup) are not used: pytest 9.2 does not show them to xdist 3.8.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

        def remove_node(self, node) -> str | None:
            """Of a worker that crashed, the test that did it; what the worker had still to run goes to the others.

            xdist 3.8 also queues the files that it had finished and the crashing test: it then waits for ever.
            """
            left = {file: tests for file, tests in self.assigned_work.pop(node).items() if not all(tests.values())}
            if not left:
                return None
            first = next(iter(left.values()))
            crashed = next(test for test, done in first.items() if not done)
            first[crashed] = True
            self.workqueue.update({file: tests for file, tests in left.items() if not all(tests.values())})
            for other in self.assigned_work:
                self._reschedule(other)
            return crashed

    return Scheduling(config, log)


def _group(nodeid: str) -> str:
    """The tests that one worker runs together."""
    file = nodeid.partition("::")[0]
    return "small_run" if _looks_at_small_run(file) else file


@functools.cache
def _looks_at_small_run(file: str) -> bool:
    return "small_run: pathlib.Path" in (pathlib.Path(__file__).parents[1] / file).read_text()


@pytest.fixture(scope="session")
def shared_data():
    """`shared_data("hotpotqa/corpus.jsonl.gz")` is that file's path; skips the test where it is absent."""

    def find(name: str) -> pathlib.Path:
        path = DATA / name
        if not path.exists():
            pytest.skip(f"{path} is absent (set ROUTERL_TEST_DATA to the directory of real datasets)")
        return path

    return find


@pytest.fixture(scope="module")
def tpu_compiler():
    """For tests that compile for TPUs, in this process or in one that they start; skips them where libtpu is absent."""
    pytest.importorskip("libtpu", reason="needs the TPU compiler (the extra compile_check)")
    import jax

    jax.devices()  # this process's compiler for CPUs has read XLA_FLAGS, of which libtpu does not know all
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nobody opens a TPU here, and other tests may be compiling too
        patch.delenv("XLA_FLAGS", raising=False)
        yield


@pytest.fixture(scope="module", autouse=True)
def freed_programs():
    """Frees the compiled programs of a file's tests once a worker has many, or they take gigabytes.

    At Linux's 65,530 mappings a worker would crash.
    """
    yield
    mappings, pages = pathlib.Path("/proc/self/maps"), pathlib.Path("/proc/self/statm")
    if mappings.exists() and (
        mappings.read_text().count("\n") > 10_000
        or int(pages.read_text().split()[1]) * resource.getpagesize() > _MEMORY
    ):
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def small_run(tmp_path_factory) -> pathlib.Path:
    """Inputs of tests.training.small_run, and in `whole` an uninterrupted run of it on one device."""
    from tests.programs import finish, start
    from tests.training.small_run import make_config

    home = tmp_path_factory.mktemp("small_run")
    make_config(home)
    finish(start("tests.training.small_run", home, home / "whole", JAX_NUM_CPU_DEVICES="1"))
    return home


@pytest.fixture
def redis_server(tmp_path):
    """A redis-server of the test's own: `.url`, `.kill()`, `.start()`. Skips the test where none is installed."""
    from tests.redis import RedisServer, needs_redis

    needs_redis()
    server = RedisServer(tmp_path)
    yield server
    server.kill()
