"""A repository whose path a shell would split is served by a link, which ends with the launch."""

import secrets
from pathlib import Path

import pytest

from deepseek_launcher.launch_tag import remove_shared_memory, shared_memory
from deepseek_launcher.repository_link import with_plain_path
from support.supervising import rank_of

ODD = ["my r1", "it's", 'say "x"', "$HOME `id`", "a;b", "a\nb", "*", "(1)", "ü"]
SHOW = 'readlink -f "$2"; ls "$2"'
"""A server that tells what it was given."""


def test_the_command_names_the_link(tmp_path):
    for folder in ODD:
        for form in ("--model-repository {}", "--model-repository={}", "--model-store={}"):
            launch, repository = secrets.token_hex(4), tmp_path / folder
            option, blank, _ = form.partition(" ")
            words = [option, str(repository)] if blank else [form.format(repository)]
            command = ["tritonserver", *words, "--log-info", "a b", f"{repository}/file"]
            link = str(shared_memory(launch, "repository"))

            found = with_plain_path(command, launch, make=False)

            assert not Path(link).is_symlink()
            assert found[1:-3] == ([option, link] if blank else [form.format(link)])
            assert [found[0], *found[-3:]] == [command[0], *command[-3:]]


def test_another_command_stays():
    for command in (["tritonserver"], ["tritonserver", "--model-repository", "/models/r1_v-2.0"]):
        assert with_plain_path(command, secrets.token_hex(4), make=True) == command


def test_the_link_leads_to_the_repository_and_ends_with_the_launch(tmp_path):
    launch = secrets.token_hex(4)
    for folder in ODD[:2]:  # a second attempt finds the first one's link
        (tmp_path / folder).mkdir()
        *_, link = with_plain_path(["server", "--model-repository", str(tmp_path / folder)], launch, make=True)
        assert Path(link).resolve() == tmp_path / folder
    remove_shared_memory(launch)
    assert not Path(link).is_symlink()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_server_s_rank_makes_it(supervise, tmp_path, rank):
    """The other ranks may be on other nodes, where nobody would remove it."""
    repository = tmp_path / "a b"
    repository.mkdir()
    (repository / "model").touch()
    command = rank_of("bash", "-c", SHOW, "server", "--model-repository", str(repository))
    running = supervise(*command, environment={"OMPI_COMM_WORLD_RANK": rank})
    running.wait()

    assert (f"{repository}\nmodel\n" in running.out) == (rank == "0")
    assert not shared_memory(running.launch, "repository").is_symlink()
