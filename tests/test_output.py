"""A run's folder: refused where it would destroy, whole or not there at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from apps.errors import JobError
from tasks.manifest import Manifest
from tasks.output import MARKER, as_dir, check_output, open_run_folder


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
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != MARKER]
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def check(output: str, dataset: str = "rows.jsonl", is_local: bool = True) -> None:
    check_output(output, dataset, is_local)


@pytest.mark.parametrize("output", ["", "memory://bucket/run", "new", "run", "deep/er/run", "empty"])
def test_usable_output_is_accepted(tmp_path: Path, output: str) -> None:
    write_run(tmp_path / "run", "part-00000.parquet")
    (tmp_path / "empty").mkdir()
    before = read_tree(tmp_path)
    check(str(tmp_path / output) if output and "://" not in output else output)
    assert read_tree(tmp_path) == before


@pytest.mark.parametrize(
    ("output", "made", "reason"),
    [
        ("out", "out", "out is a file"),
        ("out/run", "out", "out is a file"),
        ("out", "out/manifest.json", "is not empty and not of an earlier run"),
        ("out", "out/results/part-00000.parquet", "is not empty and not of an earlier run"),
        (".", "thesis.txt", "is not empty and not of an earlier run"),
    ],
    ids=["file", "under-a-file", "foreign-manifest", "foreign-results", "own-files"],
)
def test_unusable_output_is_refused(tmp_path: Path, output: str, made: str, reason: str) -> None:
    (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / made).write_text("mine")
    with pytest.raises(JobError, match="output=") as caught:
        check(str(tmp_path / output))
    assert reason in str(caught.value)
    assert read_tree(tmp_path) == {made: "mine"}


def test_output_that_holds_the_data_set_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run", "part-00000.parquet")
    with pytest.raises(JobError, match="lies in it"):
        check(str(tmp_path / "run"), dataset=str(tmp_path / "run" / "results" / "part-00000.parquet"))


def test_output_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(JobError, match="output="), open_run_folder(str(tmp_path / "file" / "run")):
        pass


def test_local_output_is_refused_on_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="lost on a cluster"):
        check(str(tmp_path), is_local=False)
    check("memory://bucket/run", is_local=False)
    check("", is_local=False)


async def test_uri_gets_the_run_once(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/remote/run"
    check(uri)
    with open_run_folder(uri) as folder:
        (folder.staging / "part-00000.parquet").write_text("rows")
        folder.commit(make_manifest())
        directory = await as_dir(folder, uri)
    assert directory.path == uri
    assert sorted(read_tree(tmp_path / "remote" / "run")) == ["manifest.json", "results/part-00000.parquet"]
    assert not folder.path.exists()
    with pytest.raises(JobError, match="exists already"):
        check(uri)


def test_unused_folder_is_not_left_behind(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        with open_run_folder(str(tmp_path / name)):
            pass
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


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


STEPS = ["manifest.json", "results", "results.partial", "manifest.json.partial"]


@pytest.mark.parametrize("step", STEPS)
def test_interrupted_commit_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """A run ends while it renames: the next one that opens the folder finds the former run whole."""
    write_run(tmp_path, "part-00000.parquet", rows_in=1)
    before = read_tree(tmp_path)
    rename = Path.rename

    def rename_until(path: Path, target: Path) -> Path:
        if path.name == step:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_until)
        with pytest.raises(KeyboardInterrupt):
            write_run(tmp_path, "part-00000.parquet", rows_in=2)
    with open_run_folder(str(tmp_path)):
        assert read_tree(tmp_path) == before
    write_run(tmp_path, "part-00000.parquet", rows_in=3)
    assert read_tree(tmp_path)["results/part-00000.parquet"] == "part-00000.parquet of 3"


def test_commit_that_fails_is_undone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, "part-00000.parquet", rows_in=1)
    before = read_tree(tmp_path)

    def disk_full(*_: object, **__: object) -> str:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "model_dump_json", disk_full)
        with pytest.raises(OSError, match="no space"):
            write_run(tmp_path, rows_in=2)
    assert read_tree(tmp_path) == before


def test_folder_whose_results_were_removed_is_used_again(tmp_path: Path) -> None:
    write_run(tmp_path, "part-00000.parquet", rows_in=1)
    shutil.rmtree(tmp_path / "results")
    write_run(tmp_path, "part-00000.parquet", rows_in=2)
    assert read_tree(tmp_path)["results/part-00000.parquet"] == "part-00000.parquet of 2"


def test_output_without_a_name_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with open_run_folder("") as folder:
        folder.commit(make_manifest())
    assert folder.path.parent == tmp_path
    assert (folder.path / "manifest.json").is_file()
