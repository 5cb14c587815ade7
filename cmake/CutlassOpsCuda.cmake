# Decides whether CUDA is built, finds the CUTLASS headers, and configures a target's CUDA code.
#
# Sets CUTLASS_OPS_HAS_CUDA and, when it is ON, CUTLASS_INCLUDE_DIR and CUTLASS_VERSION.

include(CheckLanguage)

set(CUTLASS_OPS_HAS_CUDA OFF)
if(NOT CUTLASS_OPS_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "CUTLASS_OPS_CUDA is '${CUTLASS_OPS_CUDA}': it must be AUTO, ON or OFF")
endif()
if(NOT CUTLASS_OPS_CUDA STREQUAL "OFF")
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CUTLASS_OPS_HAS_CUDA ON)
  elseif(CUTLASS_OPS_CUDA STREQUAL "ON")
    message(FATAL_ERROR "CUTLASS_OPS_CUDA is ON, but no working nvcc was found: put it on PATH or set CUDACXX")
  endif()
endif()

if(NOT CUTLASS_OPS_HAS_CUDA)
  message(STATUS "cutlass_ops: building for the CPU alone (CUTLASS_OPS_CUDA=${CUTLASS_OPS_CUDA})")
  return()
endif()

# Targets take their architectures and runtime from these, so they come before the language is enabled.
set(CMAKE_CUDA_ARCHITECTURES "${CUTLASS_OPS_ARCHITECTURES}")
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)

if(CUTLASS_PATH)
  set(CUTLASS_INCLUDE_DIR "${CUTLASS_PATH}/include")
else()
  # -I steps out of pip's build environment and sees what is installed where the package goes.
  foreach(isolated "" "-I")
    execute_process(
      COMMAND "${Python_EXECUTABLE}" ${isolated} -c
              "from importlib.util import find_spec; print(find_spec('cutlass_library').submodule_search_locations[0])"
      OUTPUT_VARIABLE cutlass_library OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE missing)
    if(NOT missing)
      set(CUTLASS_INCLUDE_DIR "${cutlass_library}/source/include")
      break()
    endif()
  endforeach()
endif()
if(NOT EXISTS "${CUTLASS_INCLUDE_DIR}/cutlass/version.h")
  message(FATAL_ERROR
    "The CUTLASS headers were not found (CUTLASS_PATH is '${CUTLASS_PATH}'). Install the package nvidia-cutlass, or set "
    "CUTLASS_PATH to a folder that holds include/cutlass, or build without CUDA (CUTLASS_OPS_CUDA=OFF).")
endif()
file(STRINGS "${CUTLASS_INCLUDE_DIR}/cutlass/version.h" version_lines REGEX "^#define CUTLASS_(MAJOR|MINOR|PATCH) ")
string(REGEX REPLACE "[^0-9;]" "" version_numbers "${version_lines}")
list(JOIN version_numbers "." CUTLASS_VERSION)
message(STATUS "cutlass_ops: building CUDA kernels with ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION} "
               "for ${CUTLASS_OPS_ARCHITECTURES}; CUTLASS headers in ${CUTLASS_INCLUDE_DIR}")

find_program(CCACHE_PROGRAM ccache)
if(NOT CCACHE_PROGRAM)
  set(CCACHE_PROGRAM "")
endif()
set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE_PROGRAM})

# Each architecture takes its time to compile, so no file has one that it does not need. Kernels that
# are launched on Hopper alone have no other, unless that one is not wanted: then the launchers, which are never called,
# still need one. All others have the same code on sm_90, which shares its compilation with the PTX.
set(CUTLASS_OPS_PORTABLE_ARCHITECTURES "${CUTLASS_OPS_ARCHITECTURES}")
if("90a-real" IN_LIST CUTLASS_OPS_ARCHITECTURES AND "90-virtual" IN_LIST CUTLASS_OPS_ARCHITECTURES)
  list(REMOVE_ITEM CUTLASS_OPS_PORTABLE_ARCHITECTURES 90a-real 90-virtual)
  list(APPEND CUTLASS_OPS_PORTABLE_ARCHITECTURES 90)
endif()
set(CUTLASS_OPS_HOPPER_ARCHITECTURES "${CUTLASS_OPS_ARCHITECTURES}")
list(FILTER CUTLASS_OPS_HOPPER_ARCHITECTURES INCLUDE REGEX "^90a")
if(NOT CUTLASS_OPS_HOPPER_ARCHITECTURES)
  set(CUTLASS_OPS_HOPPER_ARCHITECTURES "${CUTLASS_OPS_ARCHITECTURES}")
endif()

# Moves the files of such kernels from a list to another.
function(cutlass_ops_split_kernels all hopper)
  set(of_hopper ${${all}})
  list(FILTER of_hopper INCLUDE REGEX "/(wgmma_[a-z0-9_]+|decode_gemm|conv_int8_wgmma|gemm_int8_collective)\\.cu$")
  list(REMOVE_ITEM ${all} ${of_hopper})
  set(${all} ${${all}} PARENT_SCOPE)
  set(${hopper} ${of_hopper} PARENT_SCOPE)
endfunction()

# Options and headers for the CUDA code of a target.
function(cutlass_ops_cuda_options target)
  target_include_directories(${target} SYSTEM PRIVATE "${CUTLASS_INCLUDE_DIR}")
  # NDEBUG in every build type: with assertions in, ptxas serialises wgmma (warning C7510). In templates nvcc takes the
  # assignment of a [[nodiscard]] Status for an ignored result (2810); the C++ compiler watches over those.
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-DNDEBUG;--expt-relaxed-constexpr;-diag-suppress=2810;-Xcompiler=-Wall,-Werror=switch>
    # Two thirds of a module, which profilers and sanitizers read.
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<CONFIG:Debug,RelWithDebInfo>>:-lineinfo>
    # Architectures, and the kernels of one architecture, are compiled side by side: a file has many of them.
    $<$<COMPILE_LANGUAGE:CUDA>:--threads=0;--split-compile=0>)
endfunction()

# For the kernels of the library, in addition: a register spill, a serialised wgmma or a lost operand is an error.
function(cutlass_ops_check_kernels target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
  set_property(TARGET ${target} PROPERTY CUDA_COMPILER_LAUNCHER
               "${Python_EXECUTABLE}" "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/nvcc_checked.py" ${CCACHE_PROGRAM})
endfunction()
