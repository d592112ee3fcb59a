"""A model on the Hugging Face hub: its files with their hashes, and their bytes.

huggingface_hub lists the files and knows tokens, mirrors, proxies and timeouts. Its own downloader is not used for the
bytes, because it neither compares hashes nor limits the rate, and waits no longer than some seconds for a hub that is
away. Versions 1 and 2 of huggingface_hub use two libraries for HTTP, httpx and httpx2, which are alike.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, get_session, hf_hub_url, hf_raise_for_status
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from deepseek_triton_build.check import is_inside
from deepseek_triton_build.text import first_names, printable_line, safe_name
from deepseek_triton_tools.repository.hub_cache import HubName
from deepseek_triton_tools.tool_errors import CheckpointError
from deepseek_triton_tools.warming.checksums import Checksum

_HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
"""The base of all errors of the library for HTTP, httpx.HTTPError or httpx2.HTTPError."""
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
_WORTH_ANOTHER_TRY = (408, 425, 429, 500, 502, 503, 504)
_MOST_TEXT = 200
_DIGITS = {"sha1": re.compile("[0-9a-f]{40}"), "sha256": re.compile("[0-9a-f]{64}")}
_COMMIT = re.compile("[0-9a-f]{40,64}")


class TryAgainError(Exception):
    """The hub can't be reached, or is busy. The message says how, for people."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        """Seconds that the hub asks to wait for; None where it asks for nothing."""


@dataclass(frozen=True)
class HubFile:
    name: str
    """Path in the repository, with slashes."""
    size: int
    """Bytes."""
    checksum: Checksum
    """SHA-256 of a large file (Git LFS), Git's SHA-1 of a small one."""

    @property
    def etag(self) -> str:
        """The digest, under which the hub's cache keeps the file."""
        return self.checksum.digest


@dataclass(frozen=True)
class HubListing:
    name: HubName
    commit: str
    """The revision's commit: a branch may move while its files are downloaded."""
    files: tuple[HubFile, ...]
    """All files, sorted by name."""


class Hub:
    """The hub that HF_ENDPOINT names, for the user that HF_TOKEN or `hf auth login` names."""

    def __init__(self, endpoint: str | None = None, token: str | None = None) -> None:
        """:raises CheckpointError: when HF_ENDPOINT is no URL."""
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self._shown = _shown(self.endpoint)
        """The endpoint, for people."""
        self._token = token
        try:
            parts = urlsplit(self.endpoint)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url:
            raise CheckpointError(
                f"HF_ENDPOINT: expected a URL such as https://huggingface.co, got {self._shown}; correct it, or "
                "unset it"
            )

    def listing(self, name: HubName) -> HubListing:
        """List all files of a revision.

        :raises TryAgainError: when the hub can't be reached, or is busy.
        :raises CheckpointError: when there is no such model or revision, or this user may not read it.
        """
        with self._errors(name):
            try:
                info = HfApi(self.endpoint, token=self._token).model_info(
                    name.model, revision=name.revision, files_metadata=True, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
                )
            except HFValidationError as error:
                raise CheckpointError(f"{name}: {printable_line(str(error))}") from error
            except json.JSONDecodeError as error:
                raise TryAgainError(f"{self._shown} answers no JSON") from error
        listed = sorted(info.siblings or (), key=lambda each: each.rfilename)
        files = [_file(each) for each in listed]
        commit, problem = str(info.sha), ""
        if unusable := [each.rfilename for each in listed if not _can_be_name(each.rfilename)]:
            problem = f"{self._shown} lists names that no file in the folder can have: {first_names(unusable)}"
        elif unknown := [each.rfilename for each, file in zip(listed, files, strict=True) if file is None]:
            problem = f"{self._shown} lists no size or no hash of {first_names(unknown)}"
        elif not _COMMIT.fullmatch(commit):
            problem = f"expected a commit from {self._shown}, got {safe_name(commit)}"
        if problem:
            raise CheckpointError(f"{name}: {problem}; correct HF_ENDPOINT, or unset it")
        return HubListing(name, commit, tuple(filter(None, files)))

    @contextmanager
    def bytes_of(self, listing: HubListing, file: HubFile, begin: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Ask for the bytes from `begin` on; the block gets where they begin, and them.

        A server that knows no ranges begins at 0. They may end early, without an error.

        :raises TryAgainError: when the hub can't be reached, is busy, or is lost on the way.
        :raises CheckpointError: when it refuses.
        """
        url = hf_hub_url(listing.name.model, file.name, revision=listing.commit, endpoint=self.endpoint)
        # Compressed bytes could not be continued in the middle.
        headers = {**build_hf_headers(token=self._token), "Accept-Encoding": "identity"}
        if begin:
            headers["Range"] = f"bytes={begin}-"
        with (
            self._errors(listing.name, file.name),
            get_session().stream(
                "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, follow_redirects=True
            ) as response,
        ):
            if response.is_error:
                response.read()
            hf_raise_for_status(response)
            yield begin if response.status_code == 206 else 0, response.iter_bytes()

    @contextmanager
    def _errors(self, name: HubName, file: str = "") -> Iterator[None]:
        what = f"{name}: {safe_name(file)}" if file else str(name)
        try:
            yield
        except HfHubHTTPError as error:
            raise self._of_status(what, name, error) from error
        except OfflineModeIsEnabled as error:
            raise CheckpointError(f"{what}: HF_HUB_OFFLINE forbids to ask the hub; unset it") from error
        except _HTTP_ERROR as error:
            reason = printable_line(str(error)) or type(error).__name__
            # The storage of large files is another server than the hub.
            try:
                host = error.request.url.netloc.decode()  # type: ignore[attr-defined]
            except RuntimeError:
                # There was no request yet.
                host = "the hub"
            raise TryAgainError(f"{host} can't be reached, or was lost: {reason}") from error

    def _of_status(self, what: str, name: HubName, error: HfHubHTTPError) -> Exception:
        status = error.response.status_code
        if status in _WORTH_ANOTHER_TRY:
            # A date, which no hub sends, is no wait.
            after = str(error.response.headers.get("retry-after", "")).strip()
            wait_s = float(after) if after.isdecimal() and len(after) < 10 else None
            return TryAgainError(f"the hub answers with status {status}", wait_s)
        url: Any = error.response.url
        message = printable_line(error.server_message or "")[:_MOST_TEXT]
        reason = f": {message}" if message else ""
        # It is a RepositoryNotFoundError, too.
        if isinstance(error, GatedRepoError):
            problem = f"access has to be asked for at {self._shown}/{name.model}; then {_LOGIN}"
        elif isinstance(error, RevisionNotFoundError):
            problem = f"there is no revision {safe_name(name.revision)}; correct --revision, or leave it out"
        elif isinstance(error, RepositoryNotFoundError):
            problem = f"{self._shown} has no such model for this user; correct the name, or {_LOGIN}"
        elif status == 401:
            problem = f"the hub refuses the token: it is wrong or has expired; {_LOGIN}"
        elif status == 403 and url.netloc != url.join(self.endpoint).netloc:
            # Each try gets a new link from the hub.
            return TryAgainError("the storage refuses the link, which may have expired")
        elif status == 403:
            problem = f"this user may not read it{reason}; ask for access, or {_LOGIN}"
        else:
            problem = f"the hub answers with status {status}{reason}"
        return CheckpointError(f"{what}: {problem}")


def _shown(endpoint: str) -> str:
    """Return the scheme and the host of a URL, which may hold a password too, or of what was meant to be one."""
    scheme = endpoint.partition("://")[0] + "://" if "://" in endpoint else ""
    # The password ends at the last @, even where it should have been written with %2F and the like.
    host = re.split("[/?#]", endpoint.removeprefix(scheme).rpartition("@")[2])[0]
    return safe_name(scheme + host)


def _can_be_name(name: str) -> bool:
    """Tell whether a file in the folder can have the name."""
    try:
        return is_inside(name) and "\0" not in name and bool(name.encode())
    except UnicodeEncodeError:
        # JSON can hold half a character.
        return False


def _file(listed: Any) -> HubFile | None:
    """Return the file; None where its size or its hash, which becomes a file's name, can't be one."""
    algorithm, size, digest = "sha1", listed.size, listed.blob_id
    if listed.lfs is not None:
        algorithm, size, digest = "sha256", listed.lfs.size, listed.lfs.sha256
    if type(size) is not int or size < 0 or not _DIGITS[algorithm].fullmatch(str(digest)):
        return None
    prefix = b"blob %d\0" % size if algorithm == "sha1" else b""
    return HubFile(listed.rfilename, size, Checksum(algorithm, digest, "the hub", prefix))
