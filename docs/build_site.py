"""Build the site of the documentation: `python docs/build_site.py` (or `make site`) writes it to `site/`.

Pages link to files outside of docs/: to the README, to examples, to each other's pictures. So that these links hold on
the site as they do in the repository, the builder gets a copy of all of them, in a folder that is laid out like the
repository; the site's front page is the README. What it warns of, such as a link to a page or heading that is not
there, ends the build.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE",
    "constraints.txt",
    "docs",
    "examples",
)


def build(site: Path, root: Path = ROOT) -> None:
    """Write the site of the repository `root` to this folder, in the place of what is there.

    Raises:
        SystemExit: a page is wrong; the builder has said how.
    """
    with TemporaryDirectory(prefix="p2ptrain-site-") as name:
        work = Path(name)
        for page in PAGES:
            source, target = root / page, work / "pages" / page
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        shutil.copy(root / "mkdocs.yml", work)
        # For the reference, which is read from the source; nothing is imported.
        (work / "p2ptrain").symlink_to(root / "p2ptrain")
        builder = Path(sysconfig.get_path("scripts")) / "zensical"
        done = subprocess.run([builder, "build", "--strict"], cwd=work, check=False)
        if done.returncode:
            sys.exit(done.returncode)
        shutil.rmtree(site, ignore_errors=True)
        shutil.move(work / "site", site)


if __name__ == "__main__":
    build(ROOT / "site")
    print("site/index.html; with search: python -m http.server --bind 127.0.0.1 --directory site")
