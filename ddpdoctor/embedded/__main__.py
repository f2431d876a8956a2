"""`python -m ddpdoctor.embedded ORDERS`: started by a rank, not by hand."""

from .watcher import main

if __name__ == "__main__":
    main()
