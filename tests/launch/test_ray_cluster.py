"""A run's own Ray: it gets the run's GPUs and no others, and ends with the run."""

import os
from pathlib import Path

import pytest

import fp8_nemo
from fp8_nemo.launch import driver
from fp8_nemo.launch.ray_cluster import take, wrong_numbers


def test_a_cluster_gives_a_run_its_gpus_by_their_own_numbers(answers_with_ray, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    code = """
import os, ray
from fp8_nemo.launch.ray_cluster import hold_others
ray.init(address="local", num_gpus=3, num_cpus=2, include_dashboard=False, log_to_driver=False)
held = hold_others(["1"], 3)

@ray.remote(num_gpus=1, num_cpus=0)
class Worker:
    def gpu(self):
        return ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES")

keep = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
worker = Worker.options(runtime_env={"env_vars": keep}).remote()
answers += [len(held), *ray.get(worker.gpu.remote(), timeout=60)]
"""
    assert answers_with_ray(code)[0] == [2, [1], None]


def test_a_gpu_that_another_run_is_on_is_not_taken_twice(tmp_path):
    here = str(tmp_path)
    assert take("0", here) and take("1", here) and not take("0", here)
    before = os.umask(0o077)
    try:
        assert take("2", here)
    finally:
        os.umask(before)
    assert (tmp_path / "fp8-nemo-gpu-2.lock").stat().st_mode & 0o777 == 0o444, "for any user"
    assert wrong_numbers(["0", "3"], 4) == ""
    assert "must be numbers below 2" in wrong_numbers(["GPU-8f"], 2)
    assert "must be numbers below 2" in wrong_numbers(["2"], 2)


def test_a_cluster_that_does_not_start_says_so_and_not_that_a_pipe_is_broken(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(driver.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="Ray did not start"), driver.own_ray():
        pass


def test_an_interrupt_stays_an_interrupt_when_the_cluster_is_gone(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    short_lived = tmp_path / "cluster"
    short_lived.write_text("#!/bin/sh\necho 127.0.0.1:1\n")
    short_lived.chmod(0o755)
    monkeypatch.setattr(driver.sys, "executable", str(short_lived))
    with pytest.raises(KeyboardInterrupt), driver.own_ray():
        raise KeyboardInterrupt


def test_a_worker_imports_in_the_order_of_the_path_whatever_lies_beside_this_package(
    answers_with_ray, monkeypatch, tmp_path
):
    """Beside an installed package lie the driver's others, which a worker may have of its own."""
    first, site, submitted = folders = [tmp_path / name for name in ("first", "site", "submitted")]
    for folder in folders:
        folder.mkdir()
        (folder / "neighbour.py").write_text(f"PLACE = {folder.name!r}\n")
    (site / "fp8_nemo").symlink_to(Path(fp8_nemo.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [first, site])))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(submitted)
    code = f"""
import sys
sys.path = [each for each in sys.path if each not in ("", {str(submitted)!r})]
import ray, fp8_nemo
from fp8_nemo.launch.ray_cluster import connect
connect(60)

@ray.remote(num_cpus=0)
def place():
    import neighbour
    return neighbour.PLACE

answers += [fp8_nemo.__file__, ray.get(place.remote(), timeout=60)]
"""
    package, place = answers_with_ray(code)[0]
    assert Path(package).parents[1] == site, "the driver's is the installed one"
    assert place == "first"
