"""What data sets are called in reports and as directories."""

from launch.evaluate import _file_name
from routerl_jax.data.readers import short_names


def test_names_tell_data_sets_apart() -> None:
    assert short_names(["a/dev.jsonl.gz", "musique:b/test.json"]) == ["dev", "test"]
    assert short_names(["a/dev.json[0:50]", "musique:b/test.json[50:]"]) == ["dev", "test"]
    assert short_names(["a/dev.json", "b/dev.json"]) == ["a-dev", "b-dev"]
    assert short_names(["configs.r1_router_small:train_questions", "configs.r1_router_small:test_questions"]) == [
        "train_questions",
        "test_questions",
    ]


def test_a_benchmark_has_a_directory_of_its_own() -> None:
    assert _file_name("atlas/test/visual") == "atlas-test-visual"
    assert _file_name("a/questions_dev.jsonl.gz") == "questions_dev"
    assert _file_name("configs.r1_router_small:test_questions") == "test_questions"
    assert _file_name("..") == "questions"
