"""The store of winners: keys, whole files, damage, locks, and processes that are killed."""

import errno
import json
import os
import signal
import time
import warnings
from dataclasses import asdict, replace

import pytest
from tests.tuning.children import in_children, wait
from tests.tuning.store_samples import CONFIGS, PLATFORM, PROBLEM, record

from tileloom import knobs
from tileloom.tuning.config import Config
from tileloom.tuning.identity import key_of
from tileloom.tuning.store import CacheWarning, Store, _checksum, read_record, readable

HERE = PROBLEM.as_json(), PLATFORM


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "winners")


def test_what_was_saved_is_found_as_it_was(store):
    assert store.find(*HERE) is None
    assert store.save(record())
    found = store.find(*HERE)
    assert found == replace(record(), candidates=found.candidates)
    assert found.config == Config({"XBLOCK": 128}, num_warps=4, num_stages=1)
    assert [one.ratio for one in found.candidates] == [1.0, 1.1]
    assert store.files() == [store.path(*HERE)]
    assert store.path(*HERE).name.startswith("add_kernel-")


def test_the_folder_lies_under_the_knob(tmp_path):
    with knobs.scope({"cache.dir": tmp_path}):
        assert Store().folder == tmp_path / "tuning" / "v1"


CHANGES = {
    "kernel": "kernels:sub_kernel",
    "source": "6" * 64,
    "types": {"x": "*bf16", "n": "i32"},
    "constants": {"scale": 1, "gone": None},
    "aligned": (),
    "options": {"launch_pdl": False},
    "size_hints": {"x": 2048},
    "stages": "list+descent",
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_part_of_the_problem_is_in_the_key(store, name):
    store.save(record())
    other = replace(PROBLEM, **{name: CHANGES[name]})
    assert store.find(other.as_json(), PLATFORM) is None


@pytest.mark.parametrize("name", ["gpu", "driver", "triton", "assembler"])
def test_each_part_of_the_machine_is_in_the_key(store, name):
    store.save(record())
    other = replace(PLATFORM, **{name: "another"})
    assert store.find(PROBLEM.as_json(), other) is None


def test_options_at_their_default_and_orders_do_not_count():
    other = replace(
        PROBLEM,
        options={"launch_pdl": True, "num_stages": 3},
        types={"n": "i32", "x": "*fp32"},
    )
    assert key_of(other.as_json(), asdict(PLATFORM)) == record().key


def damage(path, how):
    text = path.read_text()
    if how == "empty":
        path.write_text("")
    elif how == "cut":
        path.write_text(text[: len(text) // 2])
    elif how == "infinity":
        path.write_text(text.replace("0.01,", "Infinity,"))
    elif how == "edited":
        path.write_text(text.replace('"XBLOCK": 128', '"XBLOCK": 512'))
    elif how == "schema":
        path.write_text(json.dumps(json.loads(text) | {"schema": 7}))
    elif how == "another":
        content = json.loads(text)
        other = Store(path.parent / "other")
        other.save(record(platform=replace(PLATFORM, gpu="another")))
        content = other.files()[0].read_text()
        path.write_text(content)
    else:
        path.write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("empty", "it is empty"),
        ("cut", "line"),
        ("infinity", "Infinity is no number of JSON"),
        ("edited", "its checksum is another"),
        ("schema", "it is of kind 'tileloom-tuning', schema 7"),
        ("another", "its name belongs to another record"),
        ("bytes", "codec can't decode"),
    ],
)
def test_a_damaged_file_is_said_and_moved_aside(store, how, why):
    store.save(record())
    path = store.path(*HERE)
    damage(path, how)
    with pytest.warns(CacheWarning, match="is damaged: .*" + why) as said:
        assert store.find(*HERE) is None
    assert not path.exists()
    (aside,) = store.leavings()
    assert str(said[0].message).endswith(
        f"It now lies at '{aside.name}', and the kernel is tuned anew."
    )
    assert store.save(record(1))
    assert store.find(*HERE).winner == CONFIGS[1]
    assert aside.exists()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda r: r.update(measured=[1]), r"measured is \[1\]"),
        (lambda r: r.update(found_by={}), r"found_by is \{\}"),
        (lambda r: r.update(winner=[]), r"winner is \[\]"),
        (lambda r: r.update(file=None), "file is None"),
        (lambda r: r["candidates"][0].update(ms="fast"), "ms is 'fast'"),
        (lambda r: r["candidates"][1].update(ratio=True), "ratio is True"),
        (lambda r: r["candidates"][1].update(reason={}), r"reason is \{\}"),
        (lambda r: r["candidates"][0].update(registers=1.5), r"registers is 1\.5"),
        (lambda r: r["candidates"][0].update(more=1), "unexpected keyword argument 'more'"),
        (lambda r: r["candidates"][0]["config"].update(XBLOCK=2**21), "sets XBLOCK to 2097152"),
        (lambda r: r.pop("candidates"), "candidates"),
        (lambda r: r["platform"].update(gpu=3), "gpu is 3"),
        (lambda r: r["problem"].update(kernel=3), "kernel is 3"),
        (lambda r: r["problem"].update(size_hints=[["x", 4]]), r"size_hints is \[\['x', 4\]\]"),
    ],
)  # fmt: skip
def test_a_record_that_somebody_else_wrote_is_said(store, change, why):
    """With the right checksum, under the right name: its fields are looked at too."""
    store.save(record())
    path = store.path(*HERE)
    content = json.loads(path.read_text())
    change(content["record"])
    content["sha256"] = _checksum(content["record"])
    key = key_of(content["record"]["problem"], content["record"]["platform"])
    path = path.rename(path.with_name(f"add_kernel-{key[:32]}.json"))
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=why):
        read_record(path)
    ((there, found, text),) = readable(store)
    assert (there, found) == (path, None)
    assert text


def test_going_through_a_store_changes_nothing(store):
    store.save(record())
    store.save(record(platform=replace(PLATFORM, gpu="another")))
    damage(store.files()[0], "cut")
    found = list(readable(store))
    assert [one is None for _, one, _ in found].count(True) == 1
    assert len(store.files()) == 2


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path):
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "below")
    with pytest.warns(CacheWarning, match="every process tunes for itself. Try: TILELOOM_CACHE"):
        assert store.find_or_make(*HERE, lambda found: True, lambda known: record(1)) == record(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not store.save(record())


def test_a_file_system_without_locks_is_said(store, monkeypatch):
    def flock(descriptor, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("tileloom.tuning.store.fcntl.flock", flock)
    with pytest.warns(CacheWarning, match=r"cannot be locked: No locks available; processes that"):
        made = store.find_or_make(*HERE, lambda found: True, lambda known: record(1))
    assert made == record(1)
    assert store.find(*HERE).winner == CONFIGS[1]


def test_a_record_that_is_not_enough_is_given_to_the_maker(store):
    store.save(record())
    made = store.find_or_make(
        *HERE, lambda found: found.found_by == "descent",
        lambda known: replace(known, found_by="descent"),
    )  # fmt: skip
    assert made.found_by == "descent"
    assert store.find(*HERE).found_by == "descent"


def test_60_processes_on_an_empty_store_agree_and_measure_once(store, tmp_path):
    log = tmp_path / "measured"
    answers = tmp_path / "answers"
    answers.mkdir()

    def tune(number):
        def make(known):
            with open(log, "a") as file:
                file.write(f"{number}\n")
            time.sleep(0.2)  # long enough for the others to come
            return record(number % 2, measured={"by": number})

        made = store.find_or_make(*HERE, lambda found: True, make)
        (answers / str(number)).write_text(json.dumps(made.as_json()))

    children = in_children(60, tune)
    assert wait(children) == [0] * 60
    assert len(log.read_text().split()) == 1
    assert len({path.read_text() for path in answers.iterdir()}) == 1
    assert len(list(answers.iterdir())) == 60


def test_when_the_measuring_process_is_killed_another_takes_over(store, tmp_path):
    began = tmp_path / "began"

    def hang(number):
        def make(known):
            began.write_text("")
            time.sleep(600)

        store.find_or_make(*HERE, lambda found: True, make)

    (child,) = in_children(1, hang)
    while not began.exists():
        time.sleep(0.01)
    others = in_children(
        3, lambda number: store.find_or_make(*HERE, lambda found: True, lambda known: record(1))
    )
    time.sleep(0.1)
    assert store.find(*HERE) is None
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert wait(others) == [0] * 3
    assert store.find(*HERE).winner == CONFIGS[1]


def test_kill_at_any_moment_loses_nothing_recorded(store, tmp_path):
    """A writer that replaces records all the time is killed at 60 moments."""
    said = tmp_path / "said"

    def write(number):
        for step in range(10**6):
            saved = record(step % 2, measured={"step": step})
            store.save(saved)
            with open(said, "a") as file:
                file.write(f"{step}\n")

    last = 0
    for moment in range(60):
        said.unlink(missing_ok=True)
        (child,) = in_children(1, write)
        while not said.exists() or "\n" not in said.read_text():
            time.sleep(0.0005)
        time.sleep(0.0003 * (moment % 20))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = store.find(*HERE)  # a warning would be an error
        step = said.read_text().count("\n") - 1
        assert found.measured["step"] in (step, step + 1)
        assert found.winner == CONFIGS[found.measured["step"] % 2]
        last = max(last, found.measured["step"])
    assert last > 0
    # Halves of files, of writers that were killed, are no records; they count as left in a minute.
    for path in store.folder.glob(".*.new"):
        os.utime(path, (0, 0))
    assert len(store.files()) == 1
    assert set(store.leavings()) == set(store.folder.glob(".*.new"))


def test_the_store_may_be_cleared_while_it_is_used(store):
    def tune(number):
        for _ in range(20):
            store.find_or_make(*HERE, lambda found: True, lambda known: record())
            store.remove(store.path(*HERE))

    children = in_children(4, tune)
    assert wait(children) == [0] * 4


def test_waiting_is_said(store, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr("tileloom.tuning.store._SAY_AFTER_S", 0.05)
    began = tmp_path / "began"

    def slow(number):
        def make(known):
            began.write_text("")
            time.sleep(0.4)
            return record()

        store.find_or_make(*HERE, lambda found: True, make)

    (child,) = in_children(1, slow)
    while not began.exists():
        time.sleep(0.01)
    with caplog.at_level("WARNING", logger="tileloom.tuning"):
        store.find_or_make(*HERE, lambda found: True, lambda known: record(1))
    os.waitpid(child, 0)
    path = store.path(*HERE)
    assert [r.getMessage() for r in caplog.records] == [
        f"waiting for process {child}, which tunes {path.stem}"
    ]
