"""`python -m ddpdoctor.embedded ORDERS`: started by a rank, not directly."""

from .monitor_process import main

if __name__ == "__main__":
    main()
