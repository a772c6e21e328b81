"""The shipped schema and the reference page say what the code says; the examples name the schema."""

import pytest

from docs.job_page import REFERENCE_FILE, reference_text
from meshwright.config.keys import SCHEMA_FILE, SECTIONS, job_keys, job_schema, schema_text
from repository import ROOT

HOW = "run `python -m docs.job_page` in the repository's root"


def test_the_shipped_schema_is_in_step() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), HOW


def test_the_reference_page_is_in_step() -> None:
    assert (ROOT / REFERENCE_FILE).read_text(encoding="utf-8") == reference_text(), HOW


def test_the_schema_knows_every_key_and_no_other() -> None:
    schema = job_schema()
    assert schema["additionalProperties"] is False
    for section in SECTIONS:
        noun = schema["$defs"][schema["properties"][section]["$ref"].rpartition("/")[2]]
        assert noun["additionalProperties"] is False
        assert list(noun["properties"]) == [key.name for key in job_keys().values() if key.section == section]
        assert all(value["description"] for value in noun["properties"].values())


def test_the_schema_holds_nothing_that_toml_cannot() -> None:
    assert "null" not in schema_text()
    sections = job_schema()["$defs"]
    tokens = sections["TrainSection"]["properties"]["global_batch_tokens"]
    reshard = sections["LayoutRequest"]["properties"]["reshard_after_forward"]
    assert [kind["type"] for kind in tokens["anyOf"]] == ["integer", "string"]
    assert [kind["type"] for kind in reshard["anyOf"]] == ["string", "integer"]


@pytest.mark.parametrize("name", ["tiny", "llama3-8b", "llama3-70b", "llama3-405b-16k"])
def test_the_example_jobs_name_the_schema(name: str) -> None:
    file = ROOT / "examples" / f"{name}.toml"
    directive, path = file.read_text().splitlines()[0].split(" ", 1)
    assert directive == "#:schema"
    assert (file.parent / path).resolve() == SCHEMA_FILE.resolve()
