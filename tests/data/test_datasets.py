"""The digits: each way to them, each way that leads nowhere, and what is said about it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from meshwright import DataError
from meshwright.data.datasets import Digits, Download, cache_files, mnist, shipped_subset

DEAD_S = 5.0  # what a user waits at most where there is no network
Talk = Callable[[socket.socket], None]


def small_arrays(n: int = 30, m: int = 10) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(0, 256, (n, 28, 28), np.uint8),
        "y_train": np.arange(n, dtype=np.uint8) % 10,
        "x_test": rng.integers(0, 256, (m, 28, 28), np.uint8),
        "y_test": np.arange(m, dtype=np.uint8) % 10,
    }


def npz_bytes(**changes: np.ndarray | None) -> bytes:
    arrays = {k: v for k, v in {**small_arrays(), **changes}.items() if v is not None}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Keras home; no proxy stands between the tests and their local servers."""
    home = tmp_path / "keras"
    monkeypatch.setenv("KERAS_HOME", str(home))
    monkeypatch.setenv("no_proxy", "*")
    if cache_files()[1].exists():
        pytest.skip(f"this machine keeps a real MNIST in {cache_files()[1]}")
    return home / "datasets" / "mnist.npz"


@contextlib.contextmanager
def server(talk: Talk) -> Iterator[str]:
    """A local server that accepts one connection and then does as ``talk`` says; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    talk(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mnist.npz"
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
    thread.join(20)


def sends(content: bytes, announced: int | None = None, then: Talk = lambda _: None) -> Talk:
    def talk(connection: socket.socket) -> None:
        connection.recv(4096)
        length = len(content) if announced is None else announced
        connection.sendall(f"HTTP/1.0 200 OK\r\nContent-Length: {length}\r\n\r\n".encode())
        connection.sendall(content)
        then(connection)

    return talk


def waits_for_the_client(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


def trickles(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x")
        time.sleep(0.1)


def source_of(url: str, content: bytes = b"") -> Download:
    return Download(url, hashlib.sha256(content).hexdigest())


@functools.cache
def subset() -> Digits:
    return shipped_subset()


def assert_subset_with_reason(digits: Digits, reason: str) -> None:
    assert digits.origin.startswith("the subset of MNIST shipped with Meshwright")
    assert reason in digits.origin
    assert np.array_equal(digits.x_test, subset().x_test)


# The shipped subset


def test_the_subset_is_at_most_three_megabytes_and_says_whose_it_is() -> None:
    folder = resources.files("meshwright") / "digits"
    assert len((folder / "mnist_subset.npz.xz").read_bytes()) <= 3_000_000
    assert "Share Alike" in (folder / "README.md").read_text()


def test_the_subset_has_images_and_labels_of_the_stated_shapes() -> None:
    digits = subset()
    assert digits.x_train.shape == (20_000, 28, 28)
    assert digits.y_train.shape == (20_000,)
    assert digits.x_test.shape == (2_000, 28, 28)
    assert digits.y_test.shape == (2_000,)
    assert {a.dtype.name for a in (digits.x_train, digits.y_train, digits.x_test)} == {"uint8"}
    assert "20,000 digits to train on and 2,000 to test" in digits.origin


def test_the_subset_keeps_the_share_of_every_class() -> None:
    mnist_train = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    mnist_test = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    digits = subset()
    for labels, full in ((digits.y_train, mnist_train), (digits.y_test, mnist_test)):
        exact = np.array(full) * len(labels) / sum(full)
        assert np.abs(np.bincount(labels, minlength=10) - exact).max() < 1


def test_the_subset_has_no_digit_twice_and_none_in_both_parts() -> None:
    digits = subset()
    images = [image.tobytes() for image in (*digits.x_train, *digits.x_test)]
    assert len(set(images)) == len(images)


def test_the_classes_are_mixed_along_the_file() -> None:
    labels = subset().y_train
    for start in range(0, len(labels), 1000):
        assert set(labels[start : start + 1000].tolist()) == set(range(10))


def test_the_digits_are_digits() -> None:
    """Nearest class mean, the simplest classifier there is, reads most of them."""
    digits = subset()
    train, test = digits.x_train.reshape(-1, 784) / 255, digits.x_test.reshape(-1, 784) / 255
    means = np.stack([train[digits.y_train == digit].mean(0) for digit in range(10)])
    distances = ((test[:, None] - means) ** 2).sum(-1)
    assert (distances.argmin(-1) == digits.y_test).mean() > 0.78


# A path


def test_a_path_is_read_and_named(tmp_path: Path) -> None:
    path = tmp_path / "digits.npz"
    path.write_bytes(npz_bytes())
    digits = mnist(path)
    assert np.array_equal(digits.x_train, small_arrays()["x_train"])
    assert digits.origin == f"MNIST from {path} (30 digits to train on and 10 to test)"


def test_a_missing_path_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"There is no file .*nowhere\.npz\. Give the path of an"):
        mnist(tmp_path / "nowhere.npz")


def test_a_folder_is_an_error_that_lists_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "mine.npz").write_bytes(npz_bytes())
    with pytest.raises(DataError, match=r"is a folder\. In it: mine\.npz\."):
        mnist(tmp_path)


@pytest.mark.parametrize("length", [0, 10, 5000, -1], ids="kept {}".format)
def test_a_file_cut_off_anywhere_is_an_error(tmp_path: Path, length: int) -> None:
    path = tmp_path / "half.npz"
    path.write_bytes(npz_bytes()[:length])
    with pytest.raises(DataError, match=r"half\.npz \([\d,]+ bytes\) cannot be read"):
        mnist(path)


def test_a_file_with_flipped_bytes_is_an_error(tmp_path: Path) -> None:
    content = bytearray(npz_bytes())
    content[2000:2010] = bytes(255 - b for b in content[2000:2010])
    path = tmp_path / "flipped.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot be read as an \.npz file"):
        mnist(path)


def test_a_file_of_another_kind_is_an_error_that_does_not_talk_of_pickles(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("no digits here")
    with pytest.raises(DataError, match=r"an \.npz file: the archive is missing"):
        mnist(path)


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    path = tmp_path / "pickled.npz"
    path.write_bytes(npz_bytes(x_train=np.array([{"a": 1}], dtype=object)))
    with pytest.raises(DataError, match="cannot be read"):
        mnist(path)


def test_all_faults_of_the_arrays_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "odd.npz"
    arrays = small_arrays()
    path.write_bytes(
        npz_bytes(
            x_train=arrays["x_train"][:, :14],
            y_train=arrays["y_train"][:20],
            x_test=arrays["x_test"] / 255,
            y_test=arrays["y_test"] + 5,
        )
    )
    with pytest.raises(DataError) as caught:
        mnist(path)
    for fault in (
        "x_train has shape (30, 14, 28)",
        "y_train has shape (20,) beside 30 images",
        "x_test holds float64",
        "y_test goes from 5 to 14, not 0 to 9",
    ):
        assert fault in str(caught.value)


def test_missing_arrays_are_named(tmp_path: Path) -> None:
    path = tmp_path / "short.npz"
    path.write_bytes(npz_bytes(x_test=None, y_test=None))
    with pytest.raises(DataError, match=r"no array x_test, y_test among x_train, y_train"):
        mnist(path)


# The cache and the download


def test_a_cached_file_is_read_without_the_network(empty_cache: Path) -> None:
    empty_cache.parent.mkdir(parents=True)
    empty_cache.write_bytes(npz_bytes())
    digits = mnist(source=Download("http://127.0.0.1:1/never-asked", ""))
    assert str(empty_cache) in digits.origin
    assert len(digits.x_train) == 30


def test_a_download_is_taken_and_kept_in_the_cache(empty_cache: Path) -> None:
    content = npz_bytes()
    with server(sends(content)) as url:
        digits = mnist(source=source_of(url, content))
    assert digits.origin.startswith(f"MNIST from {url}")
    assert digits.origin.endswith(f"kept in {empty_cache}")
    assert empty_cache.read_bytes() == content
    assert list(empty_cache.parent.iterdir()) == [empty_cache]


def test_an_unreadable_cache_is_replaced_by_the_download(empty_cache: Path) -> None:
    empty_cache.parent.mkdir(parents=True)
    empty_cache.write_bytes(b"half a file")
    content = npz_bytes()
    with server(sends(content)) as url:
        digits = mnist(source=source_of(url, content))
    assert len(digits.x_train) == 30
    assert empty_cache.read_bytes() == content


def test_a_cache_that_cannot_be_written_does_not_lose_the_download(empty_cache: Path) -> None:
    empty_cache.parent.parent.write_text("a file where the folder should be")
    content = npz_bytes()
    with server(sends(content)) as url:
        digits = mnist(source=source_of(url, content))
    assert len(digits.x_train) == 30
    assert "not kept" in digits.origin


@pytest.mark.parametrize(
    ("talk", "reason"),
    [
        pytest.param(sends(npz_bytes()[:-100]), "not MNIST (wrong hash)", id="half a file"),
        pytest.param(sends(b"<html>log in</html>"), "not MNIST (wrong hash)", id="a log-in page"),
        pytest.param(sends(npz_bytes()[:-9], len(npz_bytes())), "not MNIST", id="cut short"),
        pytest.param(lambda c: c.sendall(b"no http"), "The download", id="not HTTP"),
        pytest.param(lambda c: c.close(), "The download", id="closes at once"),
    ],
)
def test_a_bad_download_is_never_kept(empty_cache: Path, talk: Talk, reason: str) -> None:
    with server(talk) as url:
        assert_subset_with_reason(mnist(source=source_of(url, npz_bytes())), reason)
    assert not empty_cache.exists()


def test_a_refused_connection_gives_the_subset_at_once() -> None:
    start = time.monotonic()
    digits = mnist(source=Download("http://127.0.0.1:1/mnist.npz", ""))
    assert time.monotonic() - start < 2
    assert_subset_with_reason(digits, "The download of http://127.0.0.1:1/mnist.npz failed")


@pytest.mark.full
def test_a_dead_network_is_given_up_within_five_seconds(empty_cache: Path) -> None:
    with server(waits_for_the_client) as url:
        start = time.monotonic()
        digits = mnist(source=source_of(url))
        assert time.monotonic() - start < DEAD_S
    assert_subset_with_reason(digits, "was stopped after 3.")
    assert not empty_cache.exists()


@pytest.mark.full_for("sends a header only", "stops after a start")
@pytest.mark.parametrize(
    "talk",
    [
        pytest.param(sends(b"", 10**7, waits_for_the_client), id="sends a header only"),
        pytest.param(sends(b"x" * 10**6, 10**7, waits_for_the_client), id="stops after a start"),
        pytest.param(sends(b"", 10**7, trickles), id="trickles for ever"),
    ],
)
def test_a_network_that_dies_or_trickles_is_given_up(empty_cache: Path, talk: Talk) -> None:
    with server(talk) as url:
        digits = mnist(source=source_of(url), patience_s=0.5)
    assert_subset_with_reason(digits, "was stopped after 0.")
    assert not empty_cache.exists()


def test_a_name_that_is_never_resolved_is_given_up_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hang(*_: object, **__: object) -> None:
        released.wait(20)
        raise socket.gaierror("released by the test")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    start = time.monotonic()
    digits = mnist(source=Download("http://unresolved.invalid/mnist.npz", ""), patience_s=0.5)
    assert time.monotonic() - start < 2
    released.set()
    assert_subset_with_reason(digits, "was stopped after 0.5 s and 0 bytes")
