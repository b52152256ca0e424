"""Whether an accelerator may be there, without importing a library."""

import pytest

from aioreplica.devices.backends import _hardware


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A Linux machine without device files."""
    monkeypatch.setattr(_hardware.sys, "platform", "linux")
    monkeypatch.setattr(_hardware, "_exists", lambda node: False)
    for name in _hardware.TPU_NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_bare_machine_has_none(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("TPU_ML_PLATFORM", "JAX")  # which jax sets itself wherever it is imported

    assert not _hardware.may_have_gpu()
    assert not _hardware.may_have_tpu()


@pytest.mark.parametrize("node", _hardware.GPU_NODES)
def test_a_drivers_file_says_gpu(bare: pytest.MonkeyPatch, node: str) -> None:
    bare.setattr(_hardware, "_exists", lambda asked: asked == node)

    assert _hardware.may_have_gpu()


def test_elsewhere_than_on_linux_the_library_has_to_say(bare: pytest.MonkeyPatch) -> None:
    bare.setattr(_hardware.sys, "platform", "win32")

    assert _hardware.may_have_gpu()


def test_a_tpu_machine_is_recognized(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("TPU_NAME", "local")

    assert _hardware.may_have_tpu()


def test_a_missing_package_is_told_without_importing_it() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        _hardware.require_installed("no_such_package_here")

    assert caught.value.name == "no_such_package_here"
