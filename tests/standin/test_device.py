"""Poses are values; an unknown one is refused with the names that exist."""

import pytest
from vllm_deep_gemm_warmup.standin.device import (
    POSES,
    check_devices,
    parse_device,
)


@pytest.mark.parametrize(
    ("text", "sms", "capability"),
    [
        ("h100", 132, (9, 0)),
        ("H200", 132, (9, 0)),
        ("h100-pcie", 114, (9, 0)),
        ("h20", 78, (9, 0)),
        ("b200", 148, (10, 0)),
        ("rtx-pro-6000", 188, (12, 0)),
        ("60", 60, (9, 0)),
    ],
)
def test_pose(text: str, sms: int, capability: tuple[int, int]) -> None:
    device = parse_device(text)
    assert (device.sms, device.capability) == (sms, capability)


@pytest.mark.parametrize("text", ["a100", "", "0", "161", "-1", "13.2", "h100 pcie"])
def test_unknown_pose_names_the_known_ones(text: str) -> None:
    with pytest.raises(
        ValueError, match="h100, h100-pcie, h200, h20, b200, rtx-pro-6000"
    ):
        parse_device(text)


@pytest.mark.parametrize("count", [0, 17, -1])
def test_device_count_is_bounded(count: int) -> None:
    with pytest.raises(ValueError, match="1 to 16"):
        check_devices(count)


def test_a_count_of_sms_takes_no_boards_name() -> None:
    assert parse_device("132").name not in {pose.name for pose in POSES.values()}


def test_encoded_values_need_no_quoting() -> None:
    for pose in POSES.values():
        fields = dict(field.split("=") for field in pose.encode(2).split(";"))
        assert fields["name"] == pose.name
        assert fields["devices"] == "2"
        assert len(pose.encode(16)) < 1024
