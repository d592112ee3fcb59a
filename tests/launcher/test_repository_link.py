"""A repository whose path a shell would split is served by a link, which ends with the launch."""

import secrets
from pathlib import Path

from deepseek_launcher.command import with_plain_path
from deepseek_launcher.launch_tag import remove_shared_memory, shared_memory
from support.supervising import rank_of

ODD = ["my r1", "it's", 'say "x"', "$HOME `id`", "a;b", "a\nb", "*", "(1)", "ü"]
SHOW = 'readlink -f "$2"; ls "$2"'
"""A server that tells what it was given."""


def test_the_command_names_the_link(tmp_path):
    launch = secrets.token_hex(4)
    link = str(shared_memory(launch, "repository"))
    for folder in (tmp_path / name for name in ODD):
        for words, linked in (
            (["--model-repository", f"{folder}"], ["--model-repository", link]),
            ([f"--model-repository={folder}"], [f"--model-repository={link}"]),
            ([f"--model-store={folder}"], [f"--model-store={link}"]),
        ):
            others = ["--log-info", "a b", f"{folder}/file"]
            found = with_plain_path(["tritonserver", *words, *others], launch, make=False)
            assert found == ["tritonserver", *linked, *others]
            assert not Path(link).is_symlink()
    for command in (["tritonserver"], ["tritonserver", "--model-repository", "/models/r1_v-2.0"]):
        assert with_plain_path(command, launch, make=True) == command


def test_the_link_leads_to_the_repository_and_ends_with_the_launch(tmp_path):
    launch = secrets.token_hex(4)
    for folder in ODD[:2]:  # a second attempt finds the first one's link
        (tmp_path / folder).mkdir()
        *_, link = with_plain_path(["server", "--model-repository", str(tmp_path / folder)], launch, make=True)
        assert Path(link).resolve() == tmp_path / folder
    remove_shared_memory(launch)
    assert not Path(link).is_symlink()


def test_only_the_server_s_rank_makes_it(supervise, tmp_path):
    """The other ranks may be on other nodes, where nobody would remove it."""
    repository = tmp_path / "a b"
    repository.mkdir()
    (repository / "model").touch()
    command = rank_of("bash", "-c", SHOW, "server", "--model-repository", str(repository))
    for rank in ("0", "1"):
        running = supervise(*command, environment={"OMPI_COMM_WORLD_RANK": rank})
        running.wait()
        assert (f"{repository}\nmodel\n" in running.out) == (rank == "0")
        assert not shared_memory(running.launch, "repository").is_symlink()
