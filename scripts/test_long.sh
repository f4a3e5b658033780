#!/usr/bin/env bash
# scripts/test.sh with the full counts of drawn cases, and with the tests marked slow. Arguments go to pytest.
LP_TEST_LONG=1 exec bash "$(dirname "${BASH_SOURCE[0]}")/test.sh" -m "" --durations=20 -o faulthandler_timeout=3600 "$@"
