"""Decides what the stand-in says of itself: the devices that it poses as."""

from dataclasses import dataclass, fields, replace

MIB = 1 << 20
CUDA_VERSION = 13000
DRIVER_RELEASE = "580.159.03"
MAX_DEVICES = 16


@dataclass(frozen=True)
class Device:
    """What the host can ask a GPU about itself, as far as poses differ.

    Memory is in bytes (``total_bytes`` as the CUDA runtime reports it, ``board_bytes``
    as NVML does), clocks in kHz, the bus in bits. Names, SM counts, clocks and cache
    sizes are those the boards report; for H20, B200 and RTX PRO 6000 the runtime's
    total is NVML's less what H200 holds back, since no report of it was at hand.
    """

    name: str
    major: int
    minor: int
    sms: int
    clock_khz: int
    memory_clock_khz: int
    bus_bits: int
    l2_bytes: int
    total_bytes: int
    board_bytes: int
    pci_device: int

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor."""
        return self.major, self.minor

    def encode(self, devices: int) -> str:
        """The text that the library reads from ``STANDIN_GPU``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {"devices": devices, "cuda": CUDA_VERSION, "driver": DRIVER_RELEASE}
        return ";".join(f"{key}={value}" for key, value in values.items())


_H100 = Device(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    sms=132,
    clock_khz=1_980_000,
    memory_clock_khz=2_619_000,
    bus_bits=5120,
    l2_bytes=50 * MIB,
    total_bytes=81_079 * MIB,
    board_bytes=81_559 * MIB,
    pci_device=0x233010DE,
)

POSES: dict[str, Device] = {
    "h100": _H100,
    "h100-pcie": replace(
        _H100,
        name="NVIDIA H100 PCIe",
        sms=114,
        clock_khz=1_755_000,
        memory_clock_khz=1_593_000,
        pci_device=0x233110DE,
    ),
    "h200": replace(
        _H100,
        name="NVIDIA H200",
        memory_clock_khz=3_201_000,
        bus_bits=6144,
        l2_bytes=60 * MIB,
        total_bytes=143_156 * MIB,
        board_bytes=143_771 * MIB,
        pci_device=0x233510DE,
    ),
    "h20": replace(
        _H100,
        name="NVIDIA H20",
        sms=78,
        bus_bits=6144,
        l2_bytes=60 * MIB,
        total_bytes=97_256 * MIB,
        board_bytes=97_871 * MIB,
        pci_device=0x232910DE,
    ),
    "b200": Device(
        name="NVIDIA B200",
        major=10,
        minor=0,
        sms=148,
        clock_khz=1_965_000,
        memory_clock_khz=3_996_000,
        bus_bits=8192,
        l2_bytes=126 * MIB,
        total_bytes=182_744 * MIB,
        board_bytes=183_359 * MIB,
        pci_device=0x290110DE,
    ),
    "rtx-pro-6000": Device(
        name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        major=12,
        minor=0,
        sms=188,
        clock_khz=2_430_000,
        memory_clock_khz=12_481_000,
        bus_bits=512,
        l2_bytes=128 * MIB,
        total_bytes=97_272 * MIB,
        board_bytes=97_887 * MIB,
        pci_device=0x2BB510DE,
    ),
}


def parse_device(text: str) -> Device:
    """The device that a name or an SM count asks for.

    A number is a Hopper device with that many SMs and the rest of an H100. Its name is
    one that no board has, so that nothing takes it for a tuned one.

    Raises:
        ValueError: neither a known name nor a count from 1 to 160.
    """
    key = text.strip().lower()
    if key in POSES:
        return POSES[key]
    if key.isdecimal() and 1 <= int(key) <= 160:
        return replace(_H100, name=f"NVIDIA Hopper {int(key)} SMs", sms=int(key))
    raise ValueError(
        f"stand-in device ({text}): unknown; use one of {', '.join(POSES)} "
        "or a number of SMs from 1 to 160"
    )


def check_devices(devices: int) -> int:
    """The number of devices, if the stand-in can pose as that many.

    Raises:
        ValueError: outside 1 to 16.
    """
    if not 1 <= devices <= MAX_DEVICES:
        raise ValueError(
            f"stand-in device (devices={devices}): out of range; use 1 to {MAX_DEVICES}"
        )
    return devices
