"""Where the time of a run goes, by what Lightning does: a table in the run folder for the fit, and one for its test."""

from pathlib import Path

from lightning.pytorch.profilers import SimpleProfiler


class RunProfiler(SimpleProfiler):
    """Writes fit-profile.txt and test-profile.txt into the run folder, and says where they are."""

    def __init__(self) -> None:
        super().__init__(filename="profile")

    def describe(self) -> None:
        path = Path(self.dirpath) / self._prepare_filename()
        super().describe()
        if self.local_rank == 0:
            print(f"where the time went: {path}", flush=True)
