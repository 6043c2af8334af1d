"""The journal gives back what was appended, cuts a torn end off, and calls every other difference damage."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from transfer_queue.errors import Corrupt
from transfer_queue.net.messages import Clear, Expire, Life, Record
from transfer_queue.storage.journal import FORMAT, HEADER, MAGIC, Journal, JournalFailed, header, read_journals, rotated


def written(path: Path, count: int = 4) -> list[Record]:
    records = [Record(1, 0.5, "", 0, Life(format=FORMAT, run="r", epoch=1))]
    records += [Record(seq, seq / 3, "client", seq, Clear("p", ["k" * seq])) for seq in range(2, count + 1)]
    journal = Journal(path)
    for record in records:
        journal.append(record)
    journal.close()
    return records


def test_reading_gives_what_was_appended(tmp_path: Path) -> None:
    records = written(tmp_path / "journal")
    assert list(read_journals(tmp_path / "journal", run="r")) == records


def test_a_missing_or_empty_file_has_no_records(tmp_path: Path) -> None:
    assert list(read_journals(tmp_path / "none")) == []
    for cut in range(HEADER + 1):
        (tmp_path / "journal").write_bytes(header(1)[:cut])
        assert list(read_journals(tmp_path / "journal")) == []
        Journal(tmp_path / "journal").close()
        assert (tmp_path / "journal").read_bytes() == header(1)


@pytest.mark.parametrize("zeros", [0, 40])
def test_a_record_torn_at_any_byte_is_cut_off_and_the_file_goes_on(tmp_path: Path, zeros: int) -> None:
    path = tmp_path / "journal"
    records = written(path)
    whole = path.read_bytes()
    written(tmp_path / "shorter", 3)
    end = len((tmp_path / "shorter").read_bytes())
    for cut in [end] if zeros else range(end, len(whole)):
        path.write_bytes(whole[:cut] + bytes(zeros))
        assert list(read_journals(path)) == records[:3]
        journal = Journal(path)
        journal.append(records[3])
        journal.close()
        assert path.read_bytes() == whole


def test_after_a_record_that_found_no_room_smaller_ones_are_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    records = written(path, 2)
    journal = Journal(path)

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("transfer_queue.storage.journal.os.write", full)
        with pytest.raises(JournalFailed, match="No space left"):
            journal.append(Record(3, 1.0, "client", 3, Clear("p", ["large"])))
    with pytest.raises(JournalFailed, match="No space left"):
        journal.append(Record(4, 1.0, "client", 4, Clear("p", ["k"])))
    with pytest.raises(OSError, match="No space left"):
        journal.rotate(5)
    journal.close()
    assert list(read_journals(path)) == records


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(Corrupt, match=str(path)):
            list(read_journals(path))


def test_a_missing_record_is_found(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path, 1)
    journal = Journal(path)
    journal.append(Record(3, 1.0, "", 0, Expire()))
    journal.close()
    with pytest.raises(Corrupt, match="number 3, expected 2"):
        list(read_journals(path))


def in_two_files(path: Path) -> list[Record]:
    records = written(path)
    journal = Journal(path)
    journal.rotate(5)
    more = [Record(seq, 9.0, "client", seq, Clear("p", ["k"])) for seq in (5, 6)]
    for record in more:
        journal.append(record)
    journal.close()
    return records + more


def test_older_files_are_read_before_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    records = in_two_files(path)
    assert list(read_journals(path)) == records
    assert list(read_journals(path, after=3)) == records[3:]
    assert list(read_journals(path, after=4)) == records[4:]
    rotated(path, 1).unlink()
    assert list(read_journals(path, after=4)) == records[4:]
    with pytest.raises(Corrupt, match="begins with record 5; those from 4 on are gone"):
        list(read_journals(path, after=3))


def test_a_process_that_dies_while_it_begins_a_new_file_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    records = written(path)
    path.rename(rotated(path, 1))
    for beginning in (None, b"", header(5)[:4]):
        if beginning is not None:
            path.write_bytes(beginning)
        assert list(read_journals(path)) == records
    Journal(path, first=5).close()
    assert list(read_journals(path, after=4)) == []


def test_only_the_newest_file_may_be_torn_and_none_may_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    in_two_files(path)
    whole = rotated(path, 1).read_bytes()
    rotated(path, 1).write_bytes(whole[:-1])
    with pytest.raises(Corrupt, match="though it is not the newest"):
        list(read_journals(path))
    path.unlink()
    with pytest.raises(Corrupt, match="ends before record 4"):
        list(read_journals(path, after=4))
    rotated(path, 1).write_bytes(whole)
    path.write_bytes(header(6))
    with pytest.raises(Corrupt, match="begins with record 6, expected 5"):
        list(read_journals(path))
    path.unlink()
    rotated(path, 1).unlink()
    with pytest.raises(Corrupt, match="is gone, and with it the records from 5 on"):
        list(read_journals(path, after=4))


def test_another_run_another_format_and_another_file_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path)
    with pytest.raises(Corrupt, match="belongs to run 'r', not to 'other'"):
        list(read_journals(path, run="other"))
    path.write_bytes(MAGIC[:-1] + bytes([FORMAT + 1]))
    with pytest.raises(Corrupt, match=f"format {FORMAT + 1}; this version reads format {FORMAT}"):
        list(read_journals(path))
    path.write_bytes(b"something else")
    with pytest.raises(Corrupt, match="not a queue journal"):
        list(read_journals(path))
    path.write_bytes(b"something else entirely")
    with pytest.raises(Corrupt, match="not a queue journal"):
        list(read_journals(path))
