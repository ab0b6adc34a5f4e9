"""A run's folder: refused where it would destroy, whole or not there at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from apps.errors import JobError
from tasks.manifest import Manifest
from tasks.output import check_output, open_run_folder


def make_manifest(**overrides: int) -> Manifest:
    numbers = {"rows_in": 2, "rows_ok": 2, "rows_failed": 0, "rows_truncated": 0, **overrides}
    return Manifest(
        **numbers,
        prompt_tokens=20,
        completion_tokens=10,
        elapsed_s=1.0,
        tokens_per_s=10.0,
        model="simulated",
        model_revision="r1",
        config_fingerprint="0" * 64,
        versions={},
        parts=[],
        output="out",
    )


def write_run(output: Path, *parts: str, rows_in: int = 2) -> None:
    with open_run_folder(str(output)) as folder:
        for part in parts:
            (folder.staging / part).write_text(f"{part} of {rows_in}")
        folder.commit(make_manifest(rows_in=rows_in))


def read_tree(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


@pytest.mark.parametrize("output", ["", "s3://bucket/run", "new", "run", "deep/er/run"])
def test_usable_output_is_accepted(tmp_path: Path, output: str) -> None:
    write_run(tmp_path / "run", "part-00000.parquet")
    before = read_tree(tmp_path)
    check_output(str(tmp_path / output) if output and "://" not in output else output, is_local=True)
    assert read_tree(tmp_path) == before


@pytest.mark.parametrize(
    ("output", "made", "reason"),
    [
        ("out", "out", "out is a file"),
        ("out/run", "out", "out is a file"),
        ("out", "out/results", "results is not a folder"),
        ("out", "out/results/thesis.txt", "thesis.txt, which is not of a run"),
        ("out", "out/results/part-00000.csv", "part-00000.csv, which is not of a run"),
    ],
    ids=["file", "under-a-file", "results-is-a-file", "foreign-file", "foreign-part"],
)
def test_unusable_output_is_refused(tmp_path: Path, output: str, made: str, reason: str) -> None:
    (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / made).write_text("mine")
    with pytest.raises(JobError, match="output=") as caught:
        check_output(str(tmp_path / output), is_local=True)
    assert reason in str(caught.value)
    assert read_tree(tmp_path) == {made: "mine"}


def test_local_output_is_refused_on_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="lost on a cluster"):
        check_output(str(tmp_path), is_local=False)
    check_output("s3://bucket/run", is_local=False)
    check_output("", is_local=False)


def test_second_run_is_refused(tmp_path: Path) -> None:
    with open_run_folder(str(tmp_path)) as folder:
        (folder.staging / "part-00000.parquet").write_text("first")
        with pytest.raises(JobError, match="another run"), open_run_folder(str(tmp_path)):
            pass
        assert (folder.staging / "part-00000.parquet").read_text() == "first"
        folder.commit(make_manifest())
    with open_run_folder(str(tmp_path)):
        pass


def test_commit_replaces_stale_parts(tmp_path: Path) -> None:
    write_run(tmp_path, "part-00000.parquet", "part-00001.parquet", rows_in=2)
    write_run(tmp_path, "part-00000.parquet", rows_in=1)
    tree = read_tree(tmp_path)
    assert sorted(tree) == ["manifest.json", "results/part-00000.parquet"]
    assert tree["results/part-00000.parquet"] == "part-00000.parquet of 1"
    assert Manifest.model_validate_json(tree["manifest.json"]) == make_manifest(rows_in=1)


def test_failed_run_changes_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, "part-00000.parquet")
    before = read_tree(tmp_path)

    def fail() -> None:
        with open_run_folder(str(tmp_path)) as folder:
            (folder.staging / "part-00000.parquet").write_text("half")
            raise RuntimeError("engine")

    with pytest.raises(RuntimeError, match="engine"):
        fail()
    assert read_tree(tmp_path) == before
    assert not (tmp_path / "results.partial").exists()


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    (tmp_path / "results.partial").mkdir()
    (tmp_path / "results.partial" / "part-00007.parquet").write_text("killed")
    write_run(tmp_path, "part-00000.parquet")
    assert sorted(read_tree(tmp_path)) == ["manifest.json", "results/part-00000.parquet"]


@pytest.mark.parametrize("step", ["results.partial", "manifest.json.partial"])
def test_interrupted_commit_has_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A run ends while it renames: the folder it leaves does not claim to be whole."""
    write_run(tmp_path, "part-00000.parquet", rows_in=1)
    rename = Path.rename

    def rename_until(path: Path, target: Path) -> Path:
        if path.name == step:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_until)
        with pytest.raises(KeyboardInterrupt):
            write_run(tmp_path, "part-00000.parquet", rows_in=2)
    assert not (tmp_path / "manifest.json").exists()
    write_run(tmp_path, "part-00000.parquet", rows_in=3)
    assert read_tree(tmp_path)["results/part-00000.parquet"] == "part-00000.parquet of 3"


@pytest.mark.parametrize("output", ["", "s3://bucket/run"])
def test_remote_output_is_staged_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with open_run_folder(output) as folder:
        assert folder.path.parent == tmp_path
        folder.commit(make_manifest())
    assert (folder.path / "manifest.json").is_file()
