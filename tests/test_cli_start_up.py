"""`expert-cache enable` and `disable` in real virtual environments."""

import shutil
import stat

import pytest
from command_line import Image, files, make_image, put_whole_package
from start_up import HOOK, SAYS_REGISTERED, put_vllm

from expert_cache_shim.commands import start_up

STARTED = "import sys; print('expert_cache_shim.bootstrap' in sys.modules)"


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Image:
    return make_image(tmp_path_factory.mktemp("image"))


@pytest.fixture
def image(shared) -> Image:
    """One that nothing is enabled in."""
    if shared.hook.is_dir():
        shared.hook.rmdir()
    shared.hook.unlink(missing_ok=True)
    return shared


def test_the_line_that_starts_the_shim_is_that_of_the_wheel():
    assert HOOK.read_text() == f"{start_up.START}\n"


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_there_and_back_again(version, tmp_path):
    image = make_image(tmp_path, version)
    (image.package / "hooks.py").write_text(SAYS_REGISTERED)
    home = image.python.executable.parent.parent
    before = files(home)
    vllm = put_vllm(tmp_path / "app")
    assert image.python.says(STARTED) == "False"

    outcome = image.call("enable")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == f"wrote {image.hook}: Python starts the shim from {image.folder}\n"
    assert files(home).keys() - before.keys() == {str(image.hook.relative_to(home))}
    assert image.python.says("import vllm", path=[vllm]) == "registered\nvllm"
    assert image.python.says(STARTED, "-I") == "True"

    outcome = image.call("disable")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out == f"removed {image.hook}: Python no longer starts the shim from it\n"
    assert files(home) == before
    assert image.python.says("import vllm", path=[vllm]) == "vllm"


def test_both_can_be_repeated(image):
    image.call("enable")
    written = image.hook.read_bytes()
    outcome = image.call("enable")
    assert outcome.out == (
        f"nothing to do: {image.hook} starts the shim from {image.folder}\n"
    ) and (outcome.status == 0 and image.hook.read_bytes() == written)
    image.call("disable")
    outcome = image.call("disable")
    assert (outcome.status, outcome.out) == (0, f"nothing to do: there is no {image.hook}\n")


def test_control_the_image_that_other_tests_start_from_is_the_one_that_enable_makes(image):
    written = image.enable().hook.read_bytes()
    image.hook.unlink()
    image.call("enable")
    assert image.hook.read_bytes() == written


def test_a_python_of_another_user_can_read_the_file(image):
    image.call("enable")
    assert stat.S_IMODE(image.hook.stat().st_mode) == 0o644


def test_a_package_that_moved_is_enabled_from_its_new_place(image, tmp_path):
    image.enable()
    moved = put_whole_package(tmp_path / "new")
    outcome = image.call("enable", PYTHONPATH=str(moved))
    assert outcome.out.endswith(f"shim from {moved} (it named {image.folder} before)\n")
    folder = image.python.says("import expert_cache_shim as s; print(s.__file__)")
    assert folder == f"{moved}/expert_cache_shim/__init__.py"


def test_a_folder_that_is_gone_is_not_missed(tmp_path):
    image = make_image(tmp_path).enable()
    shutil.rmtree(image.folder)
    assert image.python.says(STARTED) == "False"


def test_a_folder_with_a_name_of_its_own(tmp_path):
    image = make_image(tmp_path / "é and # import")
    image.call("enable")
    assert image.python.says(STARTED) == "True"


@pytest.mark.parametrize("text", [HOOK.read_text(), "", f"{start_up.MARK}\nimport sys\n"])
@pytest.mark.parametrize("command", ["enable", "disable"])
def test_a_file_of_somebody_else_is_left_alone(image, command, text):
    image.hook.write_text(text)
    assert image.refusal(command) == (
        f"{image.hook} was not written by `expert-cache enable`; remove it by hand"
    )
    assert image.hook.read_text() == text


@pytest.mark.parametrize("command", ["enable", "disable"])
def test_what_is_in_the_way_is_named(image, command):
    image.hook.mkdir()
    assert image.refusal(command) == (
        f"{image.hook}: Is a directory; run this as a user who may write to {image.hook.parent}"
    )


@pytest.mark.parametrize("named", ["environment", "site-packages"])
def test_another_environment(image, tmp_path, named):
    other = make_image(tmp_path / "other")
    home = other.python.executable.parent.parent
    prefix = str(home if named == "environment" else other.python.site_packages)
    image.call("enable", "--prefix", prefix)
    assert not image.hook.exists()
    assert other.python.says(STARTED) == "True"
    image.call("disable", "--prefix", prefix)
    assert other.python.says(STARTED) == "False"


def test_the_packages_of_one_python_are_not_given_to_another(tmp_path):
    """A .pth that names a site-packages would put all of it on the path."""
    image, other = make_image(tmp_path / "one"), make_image(tmp_path / "other")
    inside = image.python.site_packages / "expert_cache_shim"
    shutil.move(image.package, inside)
    image = Image(image.python, image.python.site_packages)
    line = image.refusal("enable", "--prefix", str(other.python.site_packages))
    assert line.startswith(f"{image.folder}: has packages of another Python beside this one; ")
    assert not other.hook.exists()
    assert image.call("enable").status == 0
    assert image.python.says(STARTED) == "True"


def test_a_prefix_may_be_one_of_debian(image, tmp_path):
    folder = tmp_path / "usr" / "local" / "lib" / "python3.11" / "dist-packages"
    folder.mkdir(parents=True)
    outcome = image.call("enable", "--prefix", str(tmp_path / "usr" / "local"))
    assert outcome.out.startswith(f"wrote {folder}/expert_cache_shim.pth: ")


def test_a_prefix_must_be_one_environment(image, tmp_path):
    assert "has none" in image.refusal("enable", "--prefix", str(tmp_path / "absent"))
    for version in ("3.11", "3.12"):
        (tmp_path / "two" / "lib" / f"python{version}" / "site-packages").mkdir(parents=True)
    assert "has 2 of them" in image.refusal("enable", "--prefix", str(tmp_path / "two"))
