"""The EC connector between real engines, with images. A hand-over is proved by metrics: a fallback answers the same."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.conftest import Handover
from tests.engine.engines import Answer, Engine, bare_part, image, metadata_parts
from triptych.engine.ec_format import HEADER_SIZE, Header, checksum, item_key

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]

# Every test takes images of its own: what an engine has seen once, it has in caches of its own.
SEEDS: Iterator[int] = itertools.count(1000)


def fresh() -> dict[str, object]:
    return image(next(SEEDS))


def items(engine: Engine, result: str, reason: str = "") -> float:
    return engine.metric("triptych_ec_items_total", result=result, reason=reason)


def file_of(images: Handover, identifier: str) -> Path:
    (path,) = images.store.glob(f"ec-*/items/{item_key(identifier).hex()}")
    return path


def plain(images: Handover, *parts: object, **more: str) -> str:
    assert images.plain is not None
    return images.plain.chat(parts, **more).text


def assert_still_serving(images: Handover) -> None:
    """A whole hand-over of a new image works."""
    part, before = fresh(), items(images.consume, "hit")
    announced = images.encode.encode([part]).ec
    assert images.consume.chat(metadata_parts(announced, "image")).text == plain(images, part)
    assert items(images.consume, "hit") == before + 1


def test_different_images_get_different_answers(images: Handover) -> None:
    assert len({plain(images, fresh()) for _ in range(5)}) == 5


@pytest.mark.parametrize("media", ["raw", "metadata"])
def test_a_consumer_takes_the_encoders_output_and_answers_as_a_plain_engine(images: Handover, media: str) -> None:
    part, before = fresh(), items(images.consume, "hit")
    loaded = images.consume.metric("triptych_ec_loaded_bytes_total")
    announced = images.encode.encode([part]).ec
    (entry,) = announced.values()
    assert entry == {"item_indices": [0], "metadata": {"image_grid_thw": [1, 8, 8]}}
    parts = [part] if media == "raw" else metadata_parts(announced, "image")
    answer = images.consume.chat(parts, ec_transfer_params=announced)
    assert answer.text == plain(images, part)
    assert len(answer.text.split()) == 12
    assert items(images.consume, "hit") == before + 1
    assert images.consume.metric("triptych_ec_loaded_bytes_total") == loaded + 16 * 64 * 4
    (identifier,) = announced
    name = item_key(identifier).hex()[:16]
    assert f"EC published: item {name}, 16 rows of 64" in images.encode.log()
    assert f"EC hit: item {name}, 16 rows of 64" in images.consume.log()


@pytest.mark.parametrize("media", ["raw", "metadata"])
def test_several_images_one_of_them_twice_over_several_steps(images: Handover, media: str) -> None:
    one, two, before = fresh(), fresh(), items(images.consume, "hit")
    announced = images.encode.encode([one, two, one]).ec
    assert sorted(entry["item_indices"] for entry in announced.values()) == [[0, 2], [1]]
    first, second, third = [one, two, one] if media == "raw" else metadata_parts(announced, "image")
    filler = {"type": "text", "text": "and now for something completely different, which takes a while to say: " * 2}
    answer = images.consume.chat([first, filler, second, filler, third])
    assert answer.text == plain(images, one, filler, two, filler, one)
    assert items(images.consume, "hit") == before + 2


def test_a_consumer_answers_by_what_is_in_the_store(images: Handover) -> None:
    """With the rows of another image in the file the answer is another: so it is these rows that are used."""
    part, other = fresh(), fresh()
    (identifier,), (wrong,) = images.encode.encode([part]).ec, images.encode.encode([other]).ec
    rows = file_of(images, wrong).read_bytes()[HEADER_SIZE:]
    header = Header(item_key(identifier), "float32", 16, 64, checksum(rows))
    file_of(images, identifier).write_bytes(header.pack() + rows)
    answer = images.consume.chat([bare_part(identifier, "image", {"image_grid_thw": [1, 8, 8]})])
    assert answer.text == plain(images, other) != plain(images, part)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def link(path: Path) -> None:
    path.rename(path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")


LOSSES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "deleted": ("missing", os.unlink),
    "bit flipped": ("corrupt", flip),
    "cut": ("corrupt", lambda path: os.truncate(path, 1000)),
    "link": ("foreign", link),
}


@pytest.mark.parametrize("loss", list(LOSSES))
def test_an_item_lost_between_the_legs_fails_that_request_alone_if_there_is_no_media(
    images: Handover, loss: str
) -> None:
    reason, lose = LOSSES[loss]
    announced, before = images.encode.encode([fresh()]).ec, items(images.consume, "failed", reason)
    lose(file_of(images, *announced))
    assert images.consume.chat(metadata_parts(announced, "image")).status == 500
    assert items(images.consume, "failed", reason) == before + 1
    assert_still_serving(images)


@pytest.mark.parametrize("loss", list(LOSSES))
def test_an_item_lost_between_the_legs_is_encoded_by_the_consumer_if_it_has_the_media(
    images: Handover, loss: str
) -> None:
    reason, lose = LOSSES[loss]
    part, before = fresh(), items(images.consume, "fallback", reason)
    announced = images.encode.encode([part]).ec
    lose(file_of(images, *announced))
    assert images.consume.chat([part], ec_transfer_params=announced).text == plain(images, part)
    assert items(images.consume, "fallback", reason) == before + 1


@pytest.mark.parametrize("uuid", ["unknown", "../../../../evil", "/tmp/triptych-evil/x"])
def test_an_item_that_never_was_fails_that_request_alone_and_touches_no_path(images: Handover, uuid: str) -> None:
    before = items(images.consume, "failed", "missing")
    assert images.consume.chat([bare_part(uuid, "image", {"image_grid_thw": [1, 8, 8]})]).status == 500
    assert items(images.consume, "failed", "missing") == before + 1
    assert_still_serving(images)
    assert not Path("/tmp/triptych-evil").exists()
    assert sorted(path.name for path in images.store.rglob("*") if "evil" in path.name) == []


def test_an_encoder_given_a_path_for_a_name_stays_in_its_directory(images: Handover) -> None:
    part = fresh() | {"uuid": "../../escaped"}
    announced = images.encode.encode([part]).ec
    assert list(announced) == ["../../escaped"]
    assert file_of(images, "../../escaped").is_file()
    assert list(images.store.parent.rglob("*escaped*")) == []
    assert images.consume.chat(metadata_parts(announced, "image")).text == plain(images, part | {"uuid": "x"})


def test_metadata_that_does_not_fit_the_rows_fails_that_request_alone(images: Handover) -> None:
    announced, before = images.encode.encode([fresh()]).ec, items(images.consume, "failed", "rows")
    (identifier,) = announced
    assert images.consume.chat([bare_part(identifier, "image", {"image_grid_thw": [1, 4, 8]})]).status == 500
    assert items(images.consume, "failed", "rows") == before + 1
    assert images.consume.chat(metadata_parts(announced, "image")).status == 200
    assert_still_serving(images)


def test_what_the_encoder_has_cached_and_the_store_has_lost_is_published_again(images: Handover) -> None:
    part = fresh()
    file_of(images, *images.encode.encode([part]).ec).unlink()
    announced = images.encode.encode([part]).ec
    assert images.consume.chat(metadata_parts(announced, "image")).text == plain(images, part)


def test_an_output_that_cannot_be_stored_is_not_announced(images: Handover) -> None:
    big, before = image(next(SEEDS), 448, 448), images.encode.metric("triptych_ec_announced_total", result="withheld")
    answer = images.encode.encode([big])
    assert (answer.status, answer.ec) == (200, {})
    assert images.encode.metric("triptych_ec_announced_total", result="withheld") == before + 1
    assert "not published (too_large" in images.encode.log()
    assert images.consume.chat([big]).text == plain(images, big)


def test_requests_that_fail_do_not_disturb_those_in_the_same_batch(images: Handover) -> None:
    part = fresh()
    good = metadata_parts(images.encode.encode([part]).ec, "image")
    bad = [bare_part("not there", "image", {"image_grid_thw": [1, 8, 8]})]

    def ask(parts: list[dict[str, object]]) -> Answer:
        return images.consume.chat(parts, tokens=30)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, [good, bad, good, bad, bad, good, bad, good]))
    assert [answer.status for answer in answers] == [200, 500, 200, 500, 500, 200, 500, 200]
    assert len({answer.text for answer in answers if answer.status == 200}) == 1
    assert answers[0].text.startswith(plain(images, part))


def test_the_store_stayed_within_its_bounds_and_private(images: Handover) -> None:
    for _ in range(5):
        assert_still_serving(images)
    files = list(images.store.glob("ec-*/items/*"))
    assert sum(path.lstat().st_size for path in files) <= 16 * 1024
    assert {path.lstat().st_mode & 0o777 for path in images.store.rglob("*") if not path.is_symlink()} == {0o700, 0o600}
    assert images.encode.metric("triptych_ec_store_items") == len(files)
    assert images.encode.metric("triptych_ec_store_evicted_items") > 0
    assert all(engine.healthy() for engine in images.engines)
