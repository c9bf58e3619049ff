import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    from tests.integrations.tiny_models import save_tiny_bert

    return save_tiny_bert(tmp_path_factory.mktemp("a tiny model"))
