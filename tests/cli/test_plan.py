"""`exactmoe plan`: from a bare config and from files, as text and JSON."""

import json

import pytest

from published_configs import glm_5_3_flash


def bare(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(glm_5_3_flash()), encoding="utf-8")
    return tmp_path


def test_a_folder_with_a_config_alone(run, tmp_path):
    cards = ("--cards", "96GiB,96GiB", "--read-rate", "4.5TB/s", "--other", "15GB")
    result = run("plan", bare(tmp_path), *cards)
    assert result.exit_code == 0, result.stderr
    assert "routed experts 171.23 GB (nvfp4)" in result.stdout
    assert "card 1: experts 121 to 287 of every layer" in result.stdout
    assert "floor of the MLP layers, 1 tokens a step" in result.stdout
    assert result.stdout.endswith("fits\n")


def test_json_of_a_checkpoint(run, demo):
    result = run("plan", demo, "--cards", "1GiB", "--kv-reserve", "1MiB", "--json")
    assert result.exit_code == 0, result.stderr
    content = json.loads(result.stdout)
    inspected = json.loads(run("inspect", demo, "--headers-only", "--json").stdout)
    assert content["routed_bytes"] == sum(row["routed_bytes"] for row in inspected["layers"])
    assert content["fits"] is True
    assert content["experts"] == [list(range(len(content["experts"][0])))]
    assert content["cards"][0]["experts"] == content["routed_bytes"]


def test_what_does_not_fit_ends_with_status_2(run, tmp_path):
    result = run("plan", bare(tmp_path), "--cards", "80GiB,80GiB")
    assert result.exit_code == 2
    assert "DOES NOT FIT" in result.stdout
    assert "3 cards" in result.stdout
    assert "not counted: attention" in result.stdout


@pytest.mark.parametrize("cards", ["96GiB,96GiB", "80GiB,80GiB"])
def test_a_page_with_its_picture(run, tmp_path, cards):
    page = tmp_path / "plan.html"
    arguments = ("--cards", cards, "--read-rate", "4.5TB/s", "--html", page, "--json")
    result = run("plan", bare(tmp_path), *arguments)
    fits = cards.startswith("96")
    assert result.exit_code == (0 if fits else 2)
    picture = tmp_path / "plan-memory.png"
    assert json.loads(result.stdout)["files"] == [str(page), str(picture)]
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text(encoding="utf-8")
    assert text.count('src="data:image/png;base64,') == 1
    assert "routed experts 171.23 GB (nvfp4)" in text
    assert ("It fits." in text) is fits
    assert ("one of these is enough" in text) is not fits
    assert ("Floor of a decode step" in text) is fits
    assert "Not counted: attention" in text
    none = run("plan", bare(tmp_path), *arguments[:-3], "--html", tmp_path / "no" / "plan.html")
    assert none.exit_code == 2
    assert "--html is" in none.stderr and "a file in a folder that is there" in none.stderr


def test_refusals(run, tmp_path):
    folder = bare(tmp_path)
    for arguments, message in {
        ("--cards", "96"): "--cards is '96', a card of 96 bytes; allowed: sizes with a unit",
        ("--cards", "many"): "--cards is 'many'; allowed: bytes such as 96GiB",
        ("--cards", "1GiB", "--format", "int4"): "--format is 'int4'; allowed: nvfp4",
        ("--cards", "1GiB", "--kv-reserve", "1,2"): "--kv-reserve is '1,2' for 1 cards",
        ("--cards", "1GiB", "--rows", "0"): "--rows is 0; allowed: from 1",
        ("--cards", "1GiB", "--read-rate", "fast"): "--read-rate is 'fast'",
    }.items():
        result = run("plan", folder, *arguments)
        assert result.exit_code == 2
        assert message in result.stderr
