"""Arrays are numpy's, or those of a device, by the array API standard (https://data-apis.org/array-api).

Code over Array takes its functions from `array_api_compat.array_namespace`, so it is written once for all of them.
"""

from typing import Any

Array = Any
