"""What a person sees of a run on the pages of Prefect and MLflow, in headless Chromium."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from selenium.webdriver.remote.webdriver import WebDriver

from docs import screenshots
from docs.screenshots import Page, PageError

PROGRAMS = screenshots.find_browser()
pytestmark = [
    pytest.mark.servers,
    pytest.mark.browser,
    pytest.mark.skipif(PROGRAMS is None, reason="chromium and chromedriver are not installed"),
]


@pytest.fixture(scope="module")
def pages(pool: screenshots.Servers) -> dict[str, Page]:
    """The pages of a small run."""
    run_id = screenshots.trained(pool.home)
    return {page.name: page for page in screenshots.pages(pool, run_id)}


@pytest.fixture(scope="module")
def driver() -> Iterator[WebDriver]:
    assert PROGRAMS is not None
    with screenshots.chromium(PROGRAMS) as driver:
        yield driver


def test_prefect_shows_the_run_with_its_phases_and_artifacts(
    pages: dict[str, Page], driver: WebDriver, tmp_path: Path
) -> None:
    chosen = [page for name, page in pages.items() if name.startswith("prefect")]
    assert len(chosen) == 7
    for page in chosen:
        screenshots.look(driver, page, tmp_path, settle_s=0)


def test_mlflow_shows_the_versions_with_what_trained_them(
    pages: dict[str, Page], driver: WebDriver, tmp_path: Path
) -> None:
    chosen = [page for name, page in pages.items() if name.startswith("mlflow")]
    assert len(chosen) == 5
    for page in chosen:
        picture = screenshots.look(driver, page, tmp_path, settle_s=0)
        assert picture.stat().st_size < 150_000
        with Image.open(picture) as image:
            assert len(image.getcolors() or []) > 10  # something is drawn


def test_what_a_page_lacks_is_told(
    driver: WebDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screenshots, "PAGE_TIMEOUT_S", 0.3)
    text = '<a href="http://there/">a link</a> <p hidden>unseen</p>'
    page = Page("bare", f"data:text/html,{text}", ("a link", "unseen"), links=("http://there/", "http://no/"))
    with pytest.raises(PageError, match=r"does not show \['unseen', 'http://no/'\]; it shows: a link$"):
        screenshots.look(driver, page, tmp_path, settle_s=0)
    assert (tmp_path / "bare.png").exists()
