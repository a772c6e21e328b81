"""[cluster]: names in whatever case."""

from meshwright.spec.job.sections import ClusterSection


def test_names_are_read_in_whatever_case() -> None:
    assert ClusterSection(name="Local", device="H100-SXM") == ClusterSection(name="local", device="h100-sxm")
