"""What crosses a boundary comes back as it was, or is refused by name; nothing else ever comes of it."""

import contextlib
import hashlib
import struct
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_pvi import wire
from numpyro_pvi.errors import WireError
from numpyro_pvi.wire import KeyData, Message, decode, encode

MAGIC = b"\x89PVW\r\n\x1a\n"
ARRAYS = (np.arange(3.0), np.array([[True, False]]), np.array(-0.0, np.float32), np.zeros((0, 2), np.int64))


def look(**changed):
    fields = {"run": "r", "sequence": 7, "label": ("north", 3), "how": {"level": 1}, "q": ARRAYS, "rest": (None, KEY)}
    return Message("look?", fields | changed)


KEY = KeyData(np.array([1, 2], np.uint32), "threefry2x32")


def same(a, b):
    """Equal to the bit, types included."""
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, KeyData):
        return isinstance(b, KeyData) and a.implementation == b.implementation and same(a.data, b.data)
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def crafted(header: bytes, numbers: bytes = b"", version: int = 3) -> bytes:
    """A frame with right checksums, made here and not by the package."""
    first = struct.pack("<8sIIQQ", MAGIC, version, 0, len(header), len(numbers))
    body = first + hashlib.sha256(first).digest() + header + numbers
    return body + hashlib.sha256(body).digest()


def test_messages_come_back_to_the_bit():
    for message in (
        look(),
        look(q=(), label=None),
        Message("gap", {"run": "", "sequence": 0, "label": 1, "digest": b"\0"}),
    ):
        assert same(decode(encode(message)), message)
    key = jax.random.key(3, impl="rbg")
    found = decode(encode(look(rest=(key, jnp.ones(2, jnp.bfloat16))))).fields["rest"]
    np.testing.assert_array_equal(jax.random.key_data(found[0].on_device()), jax.random.key_data(key))
    assert found[1].dtype == jnp.bfloat16 and not found[1].flags.writeable


@pytest.mark.parametrize(
    ("message", "word"),
    [
        (Message("loook?", {}), "kind 'loook"),
        (look(row=3), "has 'row' more"),
        (Message("look?", {"run": "r"}), "lacks 'sequence'"),
        (look(sequence=True), "'sequence' of the type bool"),
        (look(q=np.zeros(2)), "'q' of the type ndarray"),
        (look(q=(object(),)), "object"),
        (look(q=(np.array(["a"]),)), "dtype"),
        (look(label=b"a", run=None), "'run' of the type NoneType"),
    ],
)
def test_what_is_no_message_is_not_written(message, word):
    with pytest.raises(WireError, match=word):
        encode(message)


@pytest.mark.parametrize(
    ("header", "word"),
    [
        (b'{"arrays": [["a", "float64", [1000000000, 1000000000]]]}', "header makes no sense"),
        (b'{"arrays": [], "arrays": []}', "header makes no sense"),
        (b"[" * 100_000, "header makes no sense"),
        (b'{"arrays": [], "kind": "stop?", "fields": {}, "more": 1}', "kind and fields are known"),
        (
            b'{"arrays": [], "kind": "stop?", "fields": {"run": "", "sequence": 1, "label": null, "code": "x"}}',
            "'code' more",
        ),
        (
            b'{"arrays": [], "kind": "stop?", "fields": {"run": "", "sequence": 1, "label": {"eval": "1"}}}',
            "makes no sense",
        ),
        (
            b'{"arrays": [], "kind": "stop?", "fields": {"run": "", "sequence": 1, "label": {"array": 0}}}',
            "makes no sense",
        ),
    ],
)
def test_crafted_messages_are_refused_before_memory_is_taken(header, word):
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match=word):
            decode(crafted(header))
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_sizes_are_held_against_limits_first():
    first = struct.pack("<8sIIQQ", MAGIC, 3, 0, 10, 1 << 40)
    with pytest.raises(WireError, match="announces 1099511627776 bytes") as caught:
        decode(first + hashlib.sha256(first).digest())
    assert caught.value.fault == "large"
    said = {"newer": "format 4, newer than the 3", "older": "format 2, older than the 3", "damaged": "make no sense"}
    for version, fault in ((4, "newer"), (2, "older"), (0, "damaged")):
        with pytest.raises(WireError, match=said[fault]) as caught:
            decode(crafted(b"{}", version=version))
        assert caught.value.fault == fault


def mutated(whole: bytes, rng) -> bytes:
    """Some bytes changed, taken out, put in, or cut off; now and then with checksums made right again."""
    data = bytearray(whole)
    for _ in range(rng.integers(1, 4)):
        place = int(rng.integers(max(len(data), 1)))
        way = rng.integers(4)
        if way == 0 and data:
            data[place] ^= int(rng.integers(1, 256))
        elif way == 1:
            del data[place : place + int(rng.integers(1, 9))]
        elif way == 2:
            data[place:place] = rng.bytes(int(rng.integers(1, 9)))
        else:
            del data[place + 1 :]
    if rng.random() < 0.5 and len(data) > 96:
        header_bytes = min(struct.unpack("<Q", data[16:24])[0], len(data) - 96)
        data = bytearray(crafted(bytes(data[64 : 64 + header_bytes]), bytes(data[64 + header_bytes : -32])))
    return bytes(data)


def survivors(read, count):
    """Mutated messages that came through, and what they became; anything but a WireError ends the test."""
    rng, whole, found = np.random.default_rng(0), encode(look()), []
    for _ in range(count):
        data = mutated(whole, rng)
        if data == whole:
            continue
        with contextlib.suppress(WireError):
            found.append((data, read(data)))
    return found


def test_ten_thousand_mutated_messages_end_in_a_named_error():
    """Without the right checksum none comes through; with it, only whole messages of the known fields and types."""
    found = survivors(decode, 10_000)
    for data, message in found:
        assert crafted(*_parts(data)) == data
        assert same(decode(encode(message)), message)
        assert {name: type(x) for name, x in message.fields.items() if name != "label"} == {
            "run": str, "sequence": int, "how": dict, "q": tuple, "rest": tuple,
        }  # fmt: skip


def _parts(data):
    header_bytes = struct.unpack("<Q", data[16:24])[0]
    return data[64 : 64 + header_bytes], data[64 + header_bytes : -32]


def test_a_reader_that_forgets_the_checksum_is_seen(monkeypatch):
    """The fuzz has teeth: without the digest, numbers that were changed on the way come through."""
    monkeypatch.setattr(wire, "_digest", lambda parts: hashlib.sha256(b"").digest())
    monkeypatch.setattr(wire, "open_frame", _careless(wire.open_frame))
    assert any(_spoilt(data) for data, _ in survivors(decode, 500))


def _careless(read):
    return lambda form, start, text, numbers, digest: read(form, start, text, numbers, hashlib.sha256(b"").digest())


def _spoilt(data):
    return hashlib.sha256(data[:-32]).digest() != data[-32:]
