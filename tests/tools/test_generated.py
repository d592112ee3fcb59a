from deepseek_triton_tools.generated import generated_files


def test_generated_files_are_what_the_sources_say():
    """`make generated` writes them again."""
    assert [str(path) for path, content in generated_files().items() if path.read_bytes() != content] == []
