"""Downloading a checkpoint from a hub on a real socket, which fails in the ways that hubs fail."""

import hashlib
import itertools
import json
import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.file_download import hf_hub_download
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepseek_triton_tools.checkpoints.download import DownloadOptions, download
from deepseek_triton_tools.checkpoints.download_target import FolderTarget
from deepseek_triton_tools.checkpoints.hub import Hub
from deepseek_triton_tools.checkpoints.verify import verify
from deepseek_triton_tools.repository.checkpoint_files import find_checkpoints
from deepseek_triton_tools.repository.checkpoint_manifest import (
    MANIFEST_NAME,
    SCHEMA,
    CheckpointManifest,
    FileRecord,
    read_manifest,
    write_manifest,
)
from deepseek_triton_tools.repository.hub_cache import HubName, unfinished_downloads
from deepseek_triton_tools.tool_errors import CheckpointError
from deepseek_triton_tools.warming.checksums import expected_checksums
from deepseek_triton_tools.warming.transfer import Pace
from support.hub_server import COMMIT, MODEL, Fault, one_tensor

SHARD, CONFIG = "model.safetensors", "config.json"


FILES = {
    SHARD: one_tensor(20_000),
    CONFIG: b'{"model_type": "deepseek_v3"}',
    "inference/model.py": b"pass\n",
    "LICENSE": b"MIT",
    "pytorch_model.bin": b"the same once more",
    "original/" + SHARD: one_tensor(100),
}
SERVED = {SHARD, CONFIG, "inference/model.py", "LICENSE"}


class Seen:
    """A view that keeps what a download shows."""

    def __init__(self):
        self.lines = []
        self.last = None

    def say(self, text):
        self.lines.append(text)

    def progress(self, progress):
        self.last = progress

    def waits_for(self, holder):
        self.lines.append(f"waits for {holder}")


@pytest.fixture
def seen():
    return Seen()


def bring(server, folder, seen, *, token="", **options):
    options = {"name": HubName(MODEL), "first_wait_s": 0.01, "give_up_s": 60.0} | options
    return download(DownloadOptions(folder=folder, **options), seen, Hub(server.url, token or None))


def refused(server, folder, seen, **options):
    with pytest.raises(CheckpointError) as raised:
        bring(server, folder, seen, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def there(folder):
    """Return the files of the checkpoint, without the records of the download."""
    paths = (path for path in folder.rglob("*") if path.is_file() and ".cache" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if path.name != MANIFEST_NAME}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The hub's own cache, which a download goes into where no folder is named."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# What is brought


def test_a_folder_gets_what_serving_needs(hub, folder, seen):
    hub.files["inference/__init__.py"] = b""
    served = {name: FILES[name] for name in SERVED} | {"inference/__init__.py": b""}
    result = bring(hub, folder, seen)
    assert there(folder) == served
    assert (result.folder, result.received) == (folder, sum(map(len, served.values())))
    assert (seen.last.done, seen.last.num_files_done) == (seen.last.total, len(served)) == (result.size, 5)
    assert seen.lines == []
    assert not list(folder.rglob("*.lock")) + unfinished_downloads(folder)

    manifest = read_manifest(folder)
    assert (manifest.source, manifest.revision) == (MODEL, COMMIT)
    assert {name: (each.size, each.sha256) for name, each in manifest.files.items()} == {
        name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in served.items()
    }
    # `hf download` finds each file there, warm verifies with its records, and a second time nothing is asked for.
    for name in served:
        assert Path(hf_hub_download(MODEL, name, local_dir=folder, local_files_only=True)) == folder / name
    (checkpoint,) = find_checkpoints(str(folder))
    assert expected_checksums(checkpoint)[folder / SHARD].digest == hashlib.sha256(FILES[SHARD]).hexdigest()
    before = dict(hub.sent)
    # What is whole may be read-only: a folder in the place of the lock can't be replaced by anybody, root included.
    (folder / ".cache" / "huggingface" / "download" / "deepseek-triton.lock").mkdir()
    assert bring(hub, folder, seen).received == 0
    assert hub.sent == before


def test_the_cache_is_the_hubs_own(hub, seen, cache):
    result = bring(hub, None, seen)
    assert there(result.folder) == {name: FILES[name] for name in SERVED}
    for name in SERVED:
        cached = hf_hub_download(MODEL, name, cache_dir=cache, local_files_only=True)
        assert Path(cached) == result.folder / name
    (checkpoint,) = find_checkpoints(MODEL)
    assert [file.path for file in checkpoint.files] == [result.folder / SHARD]
    assert bring(hub, None, seen).received == 0


def test_a_cache_that_is_not_whole_is_not_found_by_its_branch(hub, seen, cache):
    hub.always[SHARD] = Fault(status=404)
    refused(hub, None, seen)
    with pytest.raises(CheckpointError, match="has no main"):
        find_checkpoints(MODEL)
    with pytest.raises(LocalEntryNotFoundError):
        hf_hub_download(MODEL, CONFIG, cache_dir=cache, local_files_only=True)


@pytest.mark.slow
def test_equal_files_come_once_into_the_cache(hub, seen, cache):
    same = {f"{name}/__init__.py": b"" for name in "abcd"} | {f"{name}.json": bytes(200_000) for name in "abcd"}
    hub.files |= same
    result = bring(hub, None, seen, jobs=8)
    assert there(result.folder) == {name: FILES[name] for name in SERVED} | same
    assert sum(hub.sent[f"{name}.json"] for name in "abcd") == 200_000
    assert (seen.last.done, seen.last.num_files_done) == (result.size, len(SERVED) + 8)
    assert seen.lines == []


def test_more_than_there_is_room_for_is_not_begun(hub, folder, seen, cache):
    """Room for equal files is needed once in the cache."""
    hub.listed_sizes[SHARD] = 2**60
    assert "expected 1,034 PiB of free room" in refused(hub, folder, seen)
    hub.files |= {"a.safetensors": FILES[SHARD]}
    hub.listed_sizes["a.safetensors"] = 2**60
    assert "expected 1,034 PiB of free room" in refused(hub, None, seen)
    assert hub.sent == {}


def test_patterns_choose_other_files(hub, folder, seen):
    bring(hub, folder, seen, include=["*.bin", "*.json"], exclude=["conf*"])
    assert there(folder).keys() == {"pytorch_model.bin"}
    assert "the hub lists LICENSE" in refused(hub, folder, seen, include=["*.gguf"])


def test_the_manifest_keeps_what_came_before_of_the_same_commit(hub, folder, seen):
    bring(hub, folder, seen, include=["*.json"], exclude=[])
    bring(hub, folder, seen, include=["LICENSE"], exclude=[])
    good = read_manifest(folder)
    assert good.files.keys() == {CONFIG, "LICENSE"}
    # One that names itself is mended.
    write_manifest(folder, replace(good, files={**good.files, MANIFEST_NAME: FileRecord(1, "0" * 64)}))
    bring(hub, folder, seen, include=["LICENSE"], exclude=[])
    assert read_manifest(folder) == good


@pytest.mark.parametrize("is_clone", [False, True])
def test_the_models_own_manifest_is_replaced_by_the_downloads(hub, folder, seen, is_clone):
    record = {"size": 1, "sha256": "0" * 64}
    document = {"schema": SCHEMA, "source": "a model, converted", "revision": "", "files": {CONFIG: record}}
    hub.files[MANIFEST_NAME] = json.dumps(document).encode()
    if is_clone:
        folder.mkdir()
        (folder / MANIFEST_NAME).write_bytes(hub.files[MANIFEST_NAME])
    for _ in range(2):
        result = bring(hub, folder, seen)
        assert verify(folder, jobs=1, observe=lambda *_: None).damages == ()
    assert result.received == 0


def test_the_manifest_is_written_while_others_wait(hub, folder, seen, monkeypatch):
    is_locked = []
    finish = FolderTarget.finish

    def watched(target, files):
        is_locked.append(target.lock.exists())
        finish(target, files)

    monkeypatch.setattr(FolderTarget, "finish", watched)
    bring(hub, folder, seen)
    assert is_locked == [True]


# What goes wrong on the way


def test_a_cut_connection_goes_on_where_it_was_cut(hub, folder, seen):
    hub.faults[SHARD].extend([Fault(cut_after=7000), Fault(cut_after=5000)])
    bring(hub, folder, seen)
    assert hub.asked(SHARD) == [0, 7000, 12000]
    assert hub.sent[SHARD] == len(FILES[SHARD])
    assert there(folder)[SHARD] == FILES[SHARD]
    assert ["next try in" in line for line in seen.lines] == [True] * 2


def test_a_server_without_ranges_sends_all_again(hub, folder, seen):
    hub.knows_ranges = False
    hub.faults[SHARD].append(Fault(cut_after=7000))
    result = bring(hub, folder, seen)
    assert there(folder)[SHARD] == FILES[SHARD]
    assert result.received == result.size


faults = st.one_of(
    st.builds(Fault, cut_after=st.integers(0, 21_000)),
    st.builds(Fault, status=st.sampled_from([408, 429, 500, 502, 503, 504]), headers=st.just({"Retry-After": "0"})),
)


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from(["", *sorted(SERVED)]), st.lists(faults, max_size=4)),
    st.sets(st.sampled_from(sorted(SERVED))),
    st.booleans(),
)
def test_whatever_fails_the_files_come_right(hub, seen, tmp_path_factory, failing, corrupted, knows_ranges):
    hub.knows_ranges = knows_ranges
    hub.faults.clear()
    for name, each in failing.items():
        hub.faults[name].extend(each)
    for name in corrupted:
        hub.faults[name].append(Fault(wrong=True))
    folder = tmp_path_factory.mktemp("any") / "weights"
    result = bring(hub, folder, seen, first_wait_s=0.001)
    assert there(folder) == {name: FILES[name] for name in SERVED}
    assert result.received == result.size
    assert unfinished_downloads(folder) == []


def test_a_busy_hub_is_asked_again(hub, tmp_path):
    for number, (name, status) in enumerate((("", 408), (CONFIG, 429), (SHARD, 503))):
        seen = Seen()
        hub.faults[name].append(Fault(status=status, headers={"Retry-After": "0"}))
        bring(hub, tmp_path / str(number), seen)
        assert there(tmp_path / str(number)).keys() == SERVED
        (line,) = seen.lines
        assert f"status {status}; next try in 0.0 s" in line


@pytest.mark.slow
def test_it_gives_up_when_nothing_comes(hub, folder, seen):
    for name in ("", SHARD):
        hub.always = {name: Fault(status=503)}
        message = refused(hub, folder, seen, give_up_s=0.1)
        assert "status 503; nothing came for" in message
        assert "--give-up" in message
    # Or the same part again and again.
    hub.knows_ranges = False
    hub.always = {SHARD: Fault(cut_after=7000)}
    assert f"{SHARD}: localhost:{hub.port} can't be reached, or was lost" in refused(hub, folder, seen, give_up_s=0.1)
    # A wait that takes too long is not begun.
    hub.always = {SHARD: Fault(status=429, headers={"Retry-After": "3600"})}
    assert "status 429, and asks to wait 1 h 0 min" in refused(hub, folder, seen)
    hub.url = "http://127.0.0.1:9"
    assert "127.0.0.1:9 can't be reached" in refused(hub, folder, seen, give_up_s=0.05)


def test_an_endpoint_that_is_no_url_is_refused_at_once():
    endpoints = {
        "hub": "hub",
        "ftp://hub/path": "ftp://hub",
        "http://": "http:",
        "http://hub:port": "http://hub:port",
        "me:secret@hub": "hub",
        "http://me:se/secret@hub/": "http://hub",
    }
    for endpoint, got in endpoints.items():
        with pytest.raises(CheckpointError, match=rf"HF_ENDPOINT: expected a URL .*, got {got};"):
            Hub(endpoint)


def test_what_stays_wrong_is_named_and_the_others_come(hub, tmp_path, seen, subtests):
    both = (SHARD, CONFIG)
    cases = [
        ({"always": dict.fromkeys(both, Fault(wrong=True))}, "came 3 times", both),
        ({"always": dict.fromkeys(both, Fault(status=404))}, "the hub answers with status 404", both),
        ({"listed_sizes": {SHARD: 5000}}, "came 3 times", (SHARD,)),  # longer than listed
    ]
    for number, (changes, problem, names) in enumerate(cases):
        with subtests.test(changes), pytest.MonkeyPatch.context() as patch:
            for name, value in changes.items():
                patch.setattr(hub, name, value)
            folder = tmp_path / str(number)
            message = refused(hub, folder, seen)
            assert [name for name in names if f"{name}: {problem}" not in message] == []
            assert there(folder).keys() == SERVED - {*names}
            assert read_manifest(folder) is None


def test_wrong_bytes_are_thrown_away(hub, folder, seen):
    for name in (SHARD, CONFIG):
        hub.faults[name].append(Fault(wrong=True))
    bring(hub, folder, seen)
    assert there(folder) == {name: FILES[name] for name in SERVED}
    assert sorted(line.partition(";")[0] for line in seen.lines) == [
        f"{CONFIG}: its bytes are wrong by their sha1 or number",
        f"{SHARD}: its bytes are wrong by their sha256 or number",
    ]


def test_a_model_or_revision_that_is_not_there(hub, folder, seen):
    assert "has no such model for this user" in refused(hub, folder, seen, name=HubName("no/model"))
    assert "there is no revision v9" in refused(hub, folder, seen, name=HubName(MODEL, "v9"))
    assert not folder.exists()


def test_what_the_hub_lists_does_not_become_a_path(hub, folder, seen, cache, subtests):
    for name in ("../evil.py", "/evil.py", "evil\0.json", "evil\ud800.json"):
        with subtests.test(ascii(name)):
            hub.files = FILES | {name: b""}
            assert "lists names that no file in the folder can have: " in refused(hub, folder, seen)
            assert not folder.exists()
    hub.files = dict(FILES)
    precious = cache.with_name("precious.incomplete")
    precious.write_text("mine")
    for name, digest in itertools.product((SHARD, CONFIG), ("../../../precious", "0" * 63, "A" * 64, "", None)):
        with subtests.test(name, digest=digest):
            hub.listed_hashes = {name: digest}
            assert f"lists no size or no hash of {name}; correct HF_ENDPOINT" in refused(hub, None, seen)
            assert precious.read_text() == "mine"
    hub.listed_hashes = {}
    hub.listed_sizes |= {CONFIG: None, "LICENSE": -1}
    assert f"lists no size or no hash of LICENSE, {CONFIG}; correct HF_ENDPOINT" in refused(hub, folder, seen)
    hub.listed_sizes, hub.listed_commit = {}, "../" * 20
    assert "expected a commit from http://127.0.0.1" in refused(hub, folder, seen)


# Tokens


def test_a_token_reaches_the_hub_and_not_the_storage(hub, folder, seen):
    hub.token = "hf_secret"
    message = refused(hub, folder, seen, token="hf_old")
    assert "the hub refuses the token" in message
    assert "hf_old" not in message
    assert "hf auth login" in refused(hub, folder, seen)
    hub.requests.clear()
    bring(hub, folder, seen, token="hf_secret")
    assert {each.authorization for each in hub.requests if each.host == "127.0.0.1"} == {"Bearer hf_secret"}
    assert {each.authorization for each in hub.requests if each.host != "127.0.0.1"} == {""}


def test_a_token_that_expires_on_the_way_loses_nothing(hub, folder, seen):
    hub.faults[SHARD].append(Fault(cut_after=7000))
    hub.always[SHARD] = Fault(status=401, headers={"X-Error-Message": "Invalid credentials in Authorization header"})
    assert f"{SHARD}: the hub refuses the token" in refused(hub, folder, seen)
    hub.always.clear()
    bring(hub, folder, seen)
    assert hub.asked(SHARD)[-1] == 7000


def test_a_link_to_the_storage_that_has_expired_is_renewed_and_a_refusal_of_the_hub_ends_it(hub, folder, seen):
    hub.faults[SHARD].append(Fault(status=403))
    hub.always[CONFIG] = Fault(status=403)
    assert f"{CONFIG}: this user may not read it; ask for access" in refused(hub, folder, seen, give_up_s=0.1)
    assert hub.asked(CONFIG) == [0]
    assert "the storage refuses the link" in seen.lines[0]


def test_a_password_in_the_endpoint_is_not_shown(hub, folder, seen):
    shown = hub.url.rstrip("/")
    hub.url = shown.replace("//", "//me:secret@")
    hub.listed_sizes[CONFIG] = None
    messages = [refused(hub, folder, seen, name=HubName("no/model")), refused(hub, folder, seen)]
    hub.always[""] = Fault(status=403, headers={"X-Error-Code": "GatedRepo"})
    messages.append(refused(hub, folder, seen))
    assert [shown in message for message in messages] == [True] * 3
    assert "secret" not in "".join(messages)
    assert f"access has to be asked for at {shown}/{MODEL}" in messages[-1]


def test_a_storage_whose_host_is_in_the_endpoints_password_is_not_the_hub(hub, folder, seen):
    hub.url = hub.url.replace("//", f"//localhost:{hub.port}@")
    hub.faults[SHARD].append(Fault(status=403))
    bring(hub, folder, seen)
    assert "the storage refuses the link" in seen.lines[0]


# What is in the folder already


def test_files_from_elsewhere_are_compared_and_kept_or_replaced(hub, folder, seen):
    folder.mkdir()
    (folder / SHARD).write_bytes(FILES[SHARD])
    bring(hub, folder, seen)
    assert SHARD not in hub.sent
    assert seen.lines == []
    # One that changed after its download is compared again.
    (folder / SHARD).write_bytes(bytes(len(FILES[SHARD])))
    (folder / CONFIG).write_bytes(b"{")
    later = (folder / SHARD).stat().st_mtime + 10
    os.utime(folder / SHARD, (later, later))
    bring(hub, folder, seen)
    assert there(folder) == {name: FILES[name] for name in SERVED}


def test_a_damaged_file_is_replaced(hub, folder, seen):
    folder.mkdir()
    (folder / SHARD).write_bytes(bytes(len(FILES[SHARD])))
    (folder / CONFIG).write_bytes(b"{")
    (folder / "model-1.safetensors").write_bytes(b"")
    bring(hub, folder, seen)
    assert there(folder) == {name: FILES[name] for name in SERVED} | {"model-1.safetensors": b""}
    assert len(seen.lines) == 2
    assert seen.lines[0].startswith(f"{SHARD}: the file there has other bytes than the hub's")
    assert "not of this revision: model-1.safetensors" in seen.lines[1]


def test_pointers_of_a_git_clone_are_replaced(hub, folder, seen):
    folder.mkdir()
    (folder / SHARD).write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize {len(FILES[SHARD])}\n"
    )
    bring(hub, folder, seen)
    assert there(folder)[SHARD] == FILES[SHARD]
    assert "the files replace 1 Git LFS pointers" in seen.lines[0]


def test_another_models_folder_is_refused(hub, folder, seen):
    folder.write_text("")
    assert "found a file; choose another --to" in refused(hub, folder, seen)
    folder.unlink()
    hub.always[SHARD] = Fault(status=404)
    refused(hub, folder, seen)
    (claim,) = folder.rglob("deepseek-triton.source")  # of a download that has not ended
    assert claim.read_text() == MODEL
    claim.write_text("maker/other")
    assert "found files of maker/other; choose another --to" in refused(hub, folder, seen)

    ended = folder.with_name("ended")
    ended.mkdir()
    write_manifest(ended, CheckpointManifest("maker/other", "", {}))
    assert "found files of maker/other; choose another --to" in refused(hub, ended, seen)
    assert list(ended.iterdir()) == [ended / MANIFEST_NAME]


def test_a_partial_file_of_hf_download_is_continued(hub, folder, seen):
    hub.always[SHARD] = Fault(status=404)
    refused(hub, folder, seen)  # makes the folder of the records
    hub.always.clear()
    digest = hashlib.sha256(FILES[SHARD]).hexdigest()
    from huggingface_hub._local_folder import get_local_download_paths

    get_local_download_paths(folder, SHARD).incomplete_path(digest).write_bytes(FILES[SHARD][:9000])
    bring(hub, folder, seen)
    assert hub.asked(SHARD)[-1] == 9000
    assert there(folder)[SHARD] == FILES[SHARD]


@pytest.fixture
def partial(hub, folder, seen):
    """The 7,000 bytes that a download has left."""
    hub.faults[SHARD].append(Fault(cut_after=7000))
    hub.always[SHARD] = Fault(status=404)
    refused(hub, folder, seen)
    (path,) = unfinished_downloads(folder)
    return path


def test_what_another_process_wrote_meanwhile_is_not_cut_off(hub, folder, seen, partial):
    class Overtaken(Hub):
        @contextmanager
        def bytes_of(self, listing, file, begin):
            with super().bytes_of(listing, file, begin) as answer:
                partial.write_bytes(FILES[SHARD][:15_000])
                yield answer

    hub.faults[SHARD].append(Fault(cut_after=1000))
    with pytest.raises(CheckpointError):
        download(DownloadOptions(name=HubName(MODEL), folder=folder, first_wait_s=0.01), seen, Overtaken(hub.url))
    assert hub.asked(SHARD)[1:] == [7000, 7000, 8000]
    assert partial.read_bytes() == FILES[SHARD][:15_000]


def test_a_partial_file_that_is_too_long_is_begun_again(hub, folder, seen, partial):
    partial.write_bytes(bytes(len(FILES[SHARD]) + 1))
    hub.always.clear()
    bring(hub, folder, seen)
    assert hub.asked(SHARD)[-1] == 0
    assert there(folder)[SHARD] == FILES[SHARD]
    assert not any("thrown away" in line for line in seen.lines)


# Limits


def test_all_bytes_keep_to_the_rate(hub, folder, seen, monkeypatch):
    waited = []
    wait = Pace.wait
    monkeypatch.setattr(
        Pace, "wait", lambda pace, num_bytes, stop: (waited.append(num_bytes), wait(pace, num_bytes, stop))
    )
    bring(hub, folder, seen, rate_limit=1e7, jobs=1)
    assert there(folder).keys() == SERVED
    assert sum(waited) == sum(len(FILES[name]) for name in SERVED)
