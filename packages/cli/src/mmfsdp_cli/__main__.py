"""Makes ``python -m mmfsdp_cli`` the command ``mmfsdp-cli``."""

from mmfsdp_cli.main import main

if __name__ == "__main__":
    main()
