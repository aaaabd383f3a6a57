"""Archives over HTTP and packages of registries: how they arrive, go on, and fail. Nothing here leaves the machine."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedbench import sources
from fedbench.sources import (
    Archive,
    Files,
    Package,
    ProgressBar,
    SourceError,
    check_md5,
    fetch_archive,
    fetch_package,
    folder_files,
    plain,
    tar_files,
    zip_files,
)

CONTENT = bytes(range(256)) * 4000  # about a megabyte: several chunks
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server:
    """A web server on this machine that knows one file, and misbehaves as it is told."""

    def __init__(self) -> None:
        self.content = CONTENT
        self.cut = len(CONTENT)
        """bytes of a body after which the connection ends"""
        self.ranges = True
        self.pause = 0.0
        self.asked: list[str | None] = []
        """the Range of every request"""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            def log_message(self, *words: object) -> None:
                return

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def url(self, name: str = "data.bin") -> str:
        return f"http://127.0.0.1:{self._http.server_port}/{name}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range")
        self.asked.append(wanted)
        time.sleep(self.pause)
        if request.path != "/data.bin":
            request.send_error(404)
            return
        begin = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.ranges else 0
        if begin >= len(self.content):
            request.send_error(416)
            return
        body = self.content[begin:]
        request.send_response(206 if begin else 200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body[: max(self.cut - begin, 0)])

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is on this machine, whatever the machine's way to the world."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "arrived"
    made.mkdir()
    return made


def quiet(what: str, done: int, total: int | None) -> None:
    return


def archive_at(*urls: str, md5: str = MD5) -> Archive:
    return Archive("set/raw/data.bin", urls, md5)


# --- archives ---


def test_an_archive_arrives_in_its_place(server: Server, root: Path, folder: Path) -> None:
    fetch_archive(archive_at(server.url()), root, folder, quiet)

    assert (root / "set/raw/data.bin").read_bytes() == CONTENT
    assert list(folder.iterdir()) == []


def test_an_archive_that_is_there_is_not_asked_for(server: Server, root: Path, folder: Path) -> None:
    for _ in range(2):
        fetch_archive(archive_at(server.url()), root, folder, quiet)

    assert len(server.asked) == 1


def test_a_damaged_archive_in_its_place_is_replaced(server: Server, root: Path, folder: Path) -> None:
    (root / "set/raw").mkdir(parents=True)
    (root / "set/raw/data.bin").write_bytes(CONTENT[:-1])

    fetch_archive(archive_at(server.url()), root, folder, quiet)

    assert (root / "set/raw/data.bin").read_bytes() == CONTENT


def test_a_truncated_download_is_an_error_and_not_in_its_place(server: Server, root: Path, folder: Path) -> None:
    server.cut = 700_000

    with pytest.raises(SourceError, match=r"ended after 700,000 of 1,024,000 bytes; the next attempt goes on"):
        fetch_archive(archive_at(server.url()), root, folder, quiet)

    assert not root.exists()
    assert (folder / "data.bin.part").read_bytes() == CONTENT[:700_000]


def test_a_truncated_download_goes_on_where_it_stopped(server: Server, root: Path, folder: Path) -> None:
    server.cut = 700_000
    with pytest.raises(SourceError):
        fetch_archive(archive_at(server.url()), root, folder, quiet)
    server.cut = len(CONTENT)

    fetch_archive(archive_at(server.url()), root, folder, quiet)

    assert server.asked == [None, "bytes=700000-"]
    assert (root / "set/raw/data.bin").read_bytes() == CONTENT


def test_a_server_that_cannot_go_on_begins_anew(server: Server, root: Path, folder: Path) -> None:
    (folder / "data.bin.part").write_bytes(CONTENT[:1000])
    server.ranges = False

    fetch_archive(archive_at(server.url()), root, folder, quiet)

    assert (root / "set/raw/data.bin").read_bytes() == CONTENT


def test_a_part_that_is_longer_than_the_whole_is_begun_anew(server: Server, root: Path, folder: Path) -> None:
    (folder / "data.bin.part").write_bytes(CONTENT + b"more")

    fetch_archive(archive_at(server.url()), root, folder, quiet)

    assert (root / "set/raw/data.bin").read_bytes() == CONTENT


def test_a_part_that_is_whole_is_only_moved(server: Server, root: Path, folder: Path) -> None:
    (folder / "data.bin.part").write_bytes(CONTENT)

    fetch_archive(archive_at(server.url()), root, folder, quiet)

    assert server.asked == []
    assert (root / "set/raw/data.bin").read_bytes() == CONTENT


def test_an_archive_with_another_checksum_is_refused_and_deleted(server: Server, root: Path, folder: Path) -> None:
    server.content = CONTENT[:-1] + b"x"

    with pytest.raises(SourceError, match=f"expected {MD5}; it has been deleted"):
        fetch_archive(archive_at(server.url()), root, folder, quiet)

    assert not root.exists()
    assert list(folder.iterdir()) == []


def test_the_next_mirror_is_asked(server: Server, root: Path, folder: Path) -> None:
    fetch_archive(archive_at(server.url("elsewhere"), server.url()), root, folder, quiet)

    assert (root / "set/raw/data.bin").read_bytes() == CONTENT


def test_when_no_mirror_has_it_every_reason_is_given(server: Server, root: Path, folder: Path) -> None:
    closed = "http://127.0.0.1:9/data.bin"

    with pytest.raises(SourceError) as caught:
        fetch_archive(archive_at(server.url("elsewhere"), closed), root, folder, quiet)

    assert str(caught.value) == (
        "data.bin from 127.0.0.1: HTTP 404 Not Found, data.bin from 127.0.0.1: Connection refused"
    )


def test_a_server_that_does_not_answer_is_left_alone(
    server: Server, root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "TIMEOUT", 0.2)
    server.pause = 2.0
    started = time.monotonic()

    with pytest.raises(SourceError, match=r"no answer within 0\.2 s"):
        fetch_archive(archive_at(server.url()), root, folder, quiet)

    assert time.monotonic() - started < 1.5


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_no_fault_of_the_server(server: Server, root: Path, folder: Path) -> None:
    (folder / "data.bin.part").symlink_to("/dev/full")

    with pytest.raises(OSError, match="No space left on device") as caught:
        fetch_archive(archive_at(server.url(), server.url()), root, folder, quiet)

    assert caught.value.errno == errno.ENOSPC
    assert len(server.asked) == 1  # the second server is not even tried
    assert not root.exists()


def test_the_progress_of_an_archive_ends_at_its_size(server: Server, root: Path, folder: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []

    fetch_archive(archive_at(server.url()), root, folder, lambda *news: seen.append(news))

    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})
    assert {(what, total) for what, _, total in seen} == {("data.bin", 1_024_000)}
    assert seen[-1][1] == 1_024_000


def test_the_progress_of_a_download_that_goes_on_begins_where_it_stopped(
    server: Server, root: Path, folder: Path
) -> None:
    (folder / "data.bin.part").write_bytes(CONTENT[:1_000_000])
    seen: list[tuple[str, int, int | None]] = []

    fetch_archive(archive_at(server.url()), root, folder, lambda *news: seen.append(news))

    assert seen[0][1] > 1_000_000
    assert seen[-1][1:] == (1_024_000, 1_024_000)


# --- packages ---

NPM = Package("npm", "tiny-data", size=1000, version="1.2.3")
APT = Package("apt", "dataset-tiny", size=1000)


def tar_of(mode: str, **content: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as tar:  # type: ignore[call-overload]
        for name, value in content.items():
            entry = tarfile.TarInfo(f"package/data/{name}")
            entry.size = len(value)
            tar.addfile(entry, io.BytesIO(value))
    return packed.getvalue()


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Puts programs of these names on an otherwise empty PATH; each logs its arguments and runs the given Python."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))

    def add(name: str, body: str) -> Path:
        log = tmp_path / f"{name}.log"
        program = programs / name
        program.write_text(
            f"#!{sys.executable}\nimport sys, time\nfrom pathlib import Path\n"
            f"with open({str(log)!r}, 'a') as log:\n    log.write(' '.join(sys.argv[1:]) + '\\n')\n{body}\n"
        )
        program.chmod(0o755)
        return log

    return add


def writes(name: str, content: bytes) -> str:
    return f"Path({name!r}).write_bytes({content!r})"


def test_an_npm_package_is_packed_by_npm_in_its_version(client: Callable[[str, str], Path], folder: Path) -> None:
    log = client("npm", writes("tiny-data-1.2.3.tgz", tar_of("w:gz", a=b"one", b=b"two")))

    files = fetch_package(NPM, folder, quiet)

    assert (files("a"), files("b")) == (b"one", b"two")
    assert log.read_text().startswith("pack tiny-data@1.2.3 ")
    assert "--ignore-scripts" in log.read_text()


def test_a_debian_package_is_downloaded_by_apt(client: Callable[[str, str], Path], folder: Path) -> None:
    log = client("apt-get", writes("dataset-tiny_1_all.deb", b"deb"))
    client("dpkg-deb", f"sys.stdout.buffer.write({tar_of('w', a=b'one')!r})")

    files = fetch_package(APT, folder, quiet)

    assert files("a") == b"one"
    assert log.read_text() == "download dataset-tiny\n"


@pytest.mark.parametrize(("package", "program"), [(NPM, "npm"), (APT, "apt-get")])
def test_a_client_that_is_not_installed_is_named(
    client: Callable[[str, str], Path], folder: Path, package: Package, program: str
) -> None:
    with pytest.raises(SourceError, match=f"^{program} is not installed$"):
        fetch_package(package, folder, quiet)


NPM_GONE = """{
  "error": {
    "code": "ETARGET",
    "summary": "No matching version found for tiny-data.",
    "detail": "In most cases you are requesting a package version that doesn't exist."
  }
}
"""


@pytest.mark.parametrize(
    ("package", "program", "output", "reason"),
    [
        (NPM, "npm", f"npm warn old\n{NPM_GONE}npm error code ETARGET\n", "No matching version found for tiny-data."),
        (NPM, "npm", "npm warn old\nnpm ERR! code E404\nnpm ERR! 404 Not Found\n", "404 Not Found"),
        (APT, "apt-get", "Reading lists\nE: Unable to locate package tiny\nW: old\n", "Unable to locate package tiny"),
        (APT, "apt-get", "", "it failed without a word"),
    ],
    ids=["npm", "an old npm", "apt", "silence"],
)
def test_a_package_that_is_gone_is_said_in_the_words_of_the_client(
    client: Callable[[str, str], Path], folder: Path, package: Package, program: str, output: str, reason: str
) -> None:
    client(program, f"print({output!r}, end='')\nsys.exit(1)")

    with pytest.raises(SourceError) as caught:
        fetch_package(package, folder, quiet)

    assert str(caught.value) == reason


@pytest.mark.parametrize("kept", [0, 10, -20], ids=["empty", "in header", "in data"])
def test_a_truncated_package_is_an_error(client: Callable[[str, str], Path], folder: Path, kept: int) -> None:
    noise = hashlib.sha512(b"noise").digest() * 100
    client("npm", writes("tiny-data-1.2.3.tgz", tar_of("w:gz", a=noise)[:kept]))

    with pytest.raises(SourceError, match="the package tiny-data is damaged"):
        fetch_package(NPM, folder, quiet)


def test_a_damaged_debian_package_is_an_error(client: Callable[[str, str], Path], folder: Path) -> None:
    client("apt-get", writes("dataset-tiny_1_all.deb", b"deb"))
    client("dpkg-deb", "print('not a Debian format archive', file=sys.stderr)\nsys.exit(2)")

    with pytest.raises(SourceError, match="not a Debian format archive"):
        fetch_package(APT, folder, quiet)


def test_a_client_that_leaves_nothing_is_an_error(client: Callable[[str, str], Path], folder: Path) -> None:
    client("npm", "")

    with pytest.raises(SourceError, match="npm left no package"):
        fetch_package(NPM, folder, quiet)


@pytest.mark.parametrize(
    ("package", "program", "output"),
    [
        (NPM, "npm", "npm error code ENOSPC\nnpm error nospc write"),
        (APT, "apt-get", "E: Write error - write (28: No space left on device)"),
    ],
)
def test_a_full_disk_under_a_client_is_no_fault_of_the_source(
    client: Callable[[str, str], Path], folder: Path, package: Package, program: str, output: str
) -> None:
    client(program, f"print({output!r})\nsys.exit(1)")

    with pytest.raises(OSError, match="No space left on device") as caught:
        fetch_package(package, folder, quiet)

    assert caught.value.errno == errno.ENOSPC


def test_a_client_that_receives_nothing_is_ended(
    client: Callable[[str, str], Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "STALLED", 0.3)
    client("npm", f"{writes('pid', b'')}\nimport os\nPath('pid').write_text(str(os.getpid()))\ntime.sleep(60)")
    started = time.monotonic()

    with pytest.raises(SourceError, match=r"npm received nothing for 0\.3 s"):
        fetch_package(NPM, folder, quiet)

    assert time.monotonic() - started < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), 0)


def test_the_progress_of_a_package_is_what_its_folder_holds(client: Callable[[str, str], Path], folder: Path) -> None:
    packed = tar_of("w:gz", a=b"one")
    client(
        "npm", f"{writes('part', bytes(600))}\ntime.sleep(1)\n{writes('tiny-data-1.2.3.tgz', packed)}\ntime.sleep(1)"
    )
    seen: list[tuple[str, int, int | None]] = []

    fetch_package(NPM, folder, lambda *news: seen.append(news))

    assert {(what, total) for what, _, total in seen} == {("npm package tiny-data 1.2.3", 1000)}
    assert seen[0][1] == 0
    assert 600 in [done for _, done, _ in seen]
    assert max(done for _, done, _ in seen) <= 1000


# --- files in folders and archives ---


@pytest.fixture(params=["folder", "tar", "tar.gz", "zip"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    """Two files: `a` as it is, `b` with gzip."""
    content = {"a": b"one", "b.gz": gzip.compress(b"two")}
    if request.param == "folder":
        for name, value in content.items():
            (tmp_path / name).write_bytes(value)
        return folder_files(tmp_path)
    path = tmp_path / f"packed.{request.param}"
    if request.param == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, value in content.items():
                archive.writestr(f"gzip/{name}", value)
        return zip_files(path)
    path.write_bytes(tar_of("w:gz" if request.param == "tar.gz" else "w", **content))
    return tar_files(path)


def test_files_are_found_by_name_wherever_they_lie(files: Files) -> None:
    assert files("a") == b"one"


def test_files_may_be_packed(files: Files) -> None:
    assert (plain(files, "a"), plain(files, "b")) == (b"one", b"two")


def test_a_file_that_is_not_there_is_not_found(files: Files) -> None:
    with pytest.raises(FileNotFoundError, match=r"c\.gz"):
        plain(files, "c")


def test_the_md5_of_bytes_and_of_a_file_are_checked(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)

    check_md5(CONTENT, MD5, "bytes")
    check_md5(tmp_path / "file", MD5, "file")
    with pytest.raises(ValueError, match=f"bytes has MD5 .*, expected {MD5}"):
        check_md5(CONTENT[1:], MD5, "bytes")


# --- what the user sees meanwhile ---


def test_elsewhere_than_on_a_terminal_everything_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar() as report:
        for done in (0, 1_000_000, 2_000_000):
            report("first", done, 2_000_000)
        report("second", 0, None)

    assert capsys.readouterr() == ("", "first: 2 MB\nsecond\n")


def test_nothing_is_shown_when_nothing_happens(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar():
        pass

    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")

    with ProgressBar() as report:
        report("first", 500_000, 2_000_000)

    shown = capsys.readouterr().err
    assert "first" in shown
    assert "0.5/2.0 MB" in shown


def test_a_worker_process_shows_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("multiprocessing.parent_process", lambda: object())

    with ProgressBar() as report:
        report("first", 0, 2_000_000)

    assert capsys.readouterr() == ("", "")
