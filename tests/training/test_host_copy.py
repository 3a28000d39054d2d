"""Storages leave and come back in place, with every view of them."""

import pytest
import torch

from relax_infer.training.host_copy import HostCopy


def test_views_of_one_buffer_leave_once_and_are_views_again() -> None:
    buffer = torch.arange(12.0)
    wanted = buffer.clone()
    rows, part = buffer.view(3, 4), buffer[4:]
    other = torch.ones(3)
    host = HostCopy()
    assert host.leave([rows, part, other, torch.empty(0)], device="cpu") == 4 * (12 + 3)
    assert buffer.untyped_storage().nbytes() == 0
    host.come_back()
    assert torch.equal(buffer, wanted)
    part[0] = -1
    assert rows[1, 0] == -1
    assert other.tolist() == [1, 1, 1]


def test_what_is_on_another_device_stays() -> None:
    tensor = torch.ones(3)
    host = HostCopy()
    assert host.leave([tensor]) == 0
    assert tensor.tolist() == [1, 1, 1]


def test_a_return_that_fails_half_way_can_be_undone_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = torch.arange(4.0), torch.arange(4.0, 8.0)
    host = HostCopy()
    host.leave([first, second], device="cpu")
    copy = torch.UntypedStorage.copy_
    failing = [True]

    def full(self: torch.UntypedStorage, *args: object) -> object:
        if failing:
            failing.pop()
            raise RuntimeError("out of memory")
        return copy(self, *args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(torch.UntypedStorage, "copy_", full)
    with pytest.raises(RuntimeError, match="out of memory"):
        host.come_back()
    host.leave([first, second], device="cpu")
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 0
    host.come_back()
    assert first.tolist() == [0, 1, 2, 3]
    assert second.tolist() == [4, 5, 6, 7]
