from tests.config.conftest import valid

__all__ = ["valid"]
